// Decides if kernels can be started, for Python to ask before any is.

#include <cuda_runtime.h>

namespace {

__global__ void nothing() {}

}  // namespace

extern "C" {

// Version of the runtime in this library, as 1000 * major + 10 * minor.
__attribute__((visibility("default"))) int ds_sparse_cuda_runtime_version() { return CUDART_VERSION; }

// The latest that the GPU driver serves; 0 without a driver.
__attribute__((visibility("default"))) int ds_sparse_cuda_driver_version() {
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
}

// Tells if this library has machine code, or PTX, that the current GPU runs; also where nothing is known of it.
__attribute__((visibility("default"))) bool ds_sparse_cuda_has_code_for_gpu() {
  cudaFuncAttributes attributes;
  switch (cudaFuncGetAttributes(&attributes, nothing)) {
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorUnsupportedPtxVersion:
      return false;
    default:
      return true;
  }
}
}
