// From a tensor's type at run time to a template's argument.
#pragma once

#include "../common.h"

#include <type_traits>

namespace megarl {

template <typename T>
using Pointee = std::remove_pointer_t<T>;

// Calls `work` with a null pointer to what the tensor holds: float or double, int32 or int64.
template <typename Work>
void with_real(const Tensor& x, const Work& work) {
  x.scalar_type() == ScalarType::Float ? work(static_cast<float*>(nullptr))
                                       : work(static_cast<double*>(nullptr));
}

template <typename Work>
void with_index(const Tensor& x, const Work& work) {
  x.scalar_type() == ScalarType::Int ? work(static_cast<int32_t*>(nullptr))
                                     : work(static_cast<int64_t*>(nullptr));
}

}  // namespace megarl
