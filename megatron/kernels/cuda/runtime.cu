// The parts of the library's own CUDA runtime that Python needs.
#include "common.cuh"

// Makes a device current for this library's launches from the calling thread.
extern "C" int set_device(int64_t ordinal) { return cudaSetDevice(static_cast<int>(ordinal)); }

extern "C" const char* error_name(int64_t error) {
  return cudaGetErrorName(static_cast<cudaError_t>(error));
}

extern "C" const char* error_text(int64_t error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}
