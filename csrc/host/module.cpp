// megarl._host: what runs on the host between samples and tensors, and needs no torch.  Its callers in
// megarl/ops/ check arguments and word the errors; what is checked here keeps a wrong call from reading
// or writing where it should not.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>

#include "base64.h"
#include "pack.h"
#include "routing.h"

namespace py = pybind11;

namespace megarl {
namespace {

template <typename Id>
using Ids = py::array_t<Id, py::array::c_style>;

py::tuple pack_rows(Numbers sizes, int64_t row_tokens, int64_t dp, int64_t rows_multiple,
                    int64_t row_multiple, int64_t linear, int64_t quadratic, int64_t buckets) {
  const Problem problem{std::move(sizes), row_tokens,   dp,     rows_multiple,
                        row_multiple,     linear,       quadratic, buckets};
  RowPlan plan;
  {
    py::gil_scoped_release release;
    plan = pack(problem);
  }
  return py::make_tuple(std::move(plan.rows), std::move(plan.lengths));
}

template <typename Id>
int64_t find_bad(const Ids<Id>& ids, int64_t topk, int64_t experts) {
  if (topk < 1) throw std::invalid_argument("find_bad_id: topk below 1");
  return find_bad_id(ids.data(), ids.size(), topk, experts);
}

// i32 [numbers], or None for a text that is no base64 of whole numbers.
py::object ids_from_base64(const py::buffer& text) {
  const py::buffer_info in = text.request();
  if (in.itemsize != 1 || in.ndim != 1 || (in.size > 1 && in.strides[0] != 1)) {
    throw std::invalid_argument("ids_from_base64: no contiguous bytes");
  }
  const auto* from = static_cast<const char*>(in.ptr);
  const int64_t num_bytes = base64_bytes(from, in.size);
  if (num_bytes < 0 || num_bytes % sizeof(int32_t) != 0) return py::none();
  Ids<int32_t> out(num_bytes / sizeof(int32_t));
  bool good;
  {
    auto* to = reinterpret_cast<uint8_t*>(out.mutable_data());
    py::gil_scoped_release release;
    good = decode_base64(from, in.size, to);
  }
  return good ? py::object(std::move(out)) : py::none();
}

void check_bits(int bits, size_t id_bytes) {
  if (bits < 0 || bits > static_cast<int>(8 * id_bytes)) {
    throw std::invalid_argument("routing: " + std::to_string(bits) + " bits an id");
  }
}

template <typename Id>
py::bytes pack_ids(const Ids<Id>& ids, int bits) {
  check_bits(bits, sizeof(Id));
  std::string out(packed_bytes(ids.size(), bits), '\0');
  pack_bits(ids.data(), ids.size(), bits, reinterpret_cast<uint8_t*>(out.data()));
  return py::bytes(out);
}

template <typename Id>
void unpack_ids(const py::buffer& packed, int bits, Ids<Id>& out) {
  check_bits(bits, sizeof(Id));
  const py::buffer_info in = packed.request();
  const int64_t num_bytes = in.size * in.itemsize;
  if (num_bytes != packed_bytes(out.size(), bits)) {
    throw std::invalid_argument("routing: " + std::to_string(num_bytes) + " packed bytes for " +
                                std::to_string(out.size()) + " ids");
  }
  unpack_bits(static_cast<const uint8_t*>(in.ptr), out.size(), bits, out.mutable_data());
}

template <typename Id>
void define(py::module_& m) {
  m.def("find_bad_id", &find_bad<Id>, py::arg("ids").noconvert(), py::arg("topk"),
        py::arg("experts"));
  m.def("pack_ids", &pack_ids<Id>, py::arg("ids").noconvert(), py::arg("bits"));
  m.def("unpack_ids", &unpack_ids<Id>, py::arg("packed"), py::arg("bits"),
        py::arg("out").noconvert());
}

}  // namespace

PYBIND11_MODULE(_host, m) {
  m.def("pack_rows", &pack_rows);
  m.def("find_bad_id", &find_bad<int32_t>, py::arg("ids").noconvert(), py::arg("topk"),
        py::arg("experts"));
  m.def("ids_from_base64", &ids_from_base64, py::arg("text"));
  define<uint8_t>(m);
  define<uint16_t>(m);
}

}  // namespace megarl
