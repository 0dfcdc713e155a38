// Faults that sanitizers must find: see test_sanitize.py.

__global__ void write(float* out, int index) { out[index] = 1; }

__global__ void shift(int* out, int by) { out[0] = 1 << by; }

extern "C" int planted_write(float* out, int index) {
  return launch(write, dim3(1), dim3(1), 0, nullptr, out, index);
}

extern "C" int planted_shift(int* out, int by) {
  return launch(shift, dim3(1), dim3(1), 0, nullptr, out, by);
}
