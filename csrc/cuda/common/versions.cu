// The versions of CUDA that decide whether kernels can be started, for Python to ask before any is.

#include <cuda_runtime.h>

extern "C" {

// Of the runtime in this library, as 1000 * major + 10 * minor.
__attribute__((visibility("default"))) int ds_sparse_cuda_runtime_version() { return CUDART_VERSION; }

// The latest that the GPU driver serves; 0 without a driver.
__attribute__((visibility("default"))) int ds_sparse_cuda_driver_version() {
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
}
}
