"""What the compilers of csrc/ are told, by setup.py and by tools/native_build.py."""

# The oldest torch whose stable ABI the library uses (2.10), as torch/csrc/stable wants it spelt.
TORCH_TARGET_VERSION = "0x020a000000000000"
# No contraction of a multiplication and an addition into one rounding: the versions of a loop for
# AVX-512, AVX2 and the baseline, and the CUDA kernels, do one arithmetic (csrc/cpu/simd.h). The
# next two let loops with branches become vector instructions; no value depends on them. Python's
# own flags bring -fwrapv, which costs such loops a quarter of their speed: no signed number here
# overflows.
CXX_FLAGS = ["-O3", "-std=c++17", "-fvisibility=hidden", "-g0", "-Wall"]
CXX_FLAGS += ["-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno", "-fno-wrapv"]
HOST_FLAGS = ["-O3", "-std=c++17", "-fvisibility=hidden", "-g0", "-Wall"]
NVCC_FLAGS = ["-O3", "-std=c++17", "--fmad=false"]
# Hopper and Blackwell; used where the build machine has no GPU to ask.
CUDA_ARCHS = ("9.0", "10.0")
