// Every operator of the extension, one line each: this file is its table of contents.
//
// Implementations register themselves: csrc/cpu/<op>.cpp and csrc/cuda/<op>.cu.  The reference that
// defines what an op computes, its shape function and its gradient are Python: megarl/ops/<op>.py.
// Everything here uses torch's stable ABI only, so one binary loads in every torch from 2.10 on and
// in every Python, and a file compiles in about two seconds instead of half a minute.
#include "common.h"

STABLE_TORCH_LIBRARY(megarl, m) {
  m.def(
      "logprob_entropy(Tensor logits, Tensor targets, int first_column, int vocab_size, "
      "float temperature) -> Tensor");
  m.def(
      "logprob_entropy_backward_(Tensor(a!) logits, Tensor targets, Tensor softmax, Tensor grads, "
      "int first_column, int vocab_size, float temperature) -> ()");
  m.def("segment_sum(Tensor values, Tensor cu_seqlens) -> Tensor");
}
