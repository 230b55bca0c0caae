"""Kernels around the conversions of ``cuda_fp8.h`` and ``cuda_fp4.h``, compiled by NVRTC, run on torch's stream."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver, nvrtc
from torch import Tensor

HEADERS = ("cuda_fp8.h", "cuda_fp4.h")
THREADS = 256
LARGEST_GRID = 2**31 - 1
ELEMENTS = {"e4m3": 0, "e5m2": 1, "e2m1": 2}
"""Element -> the number that the kernels know it by."""
SOURCE = r"""
#include <cuda_fp8.h>
#include <cuda_fp4.h>
typedef long long i64;
typedef unsigned char u8;

__device__ u8 encode(float x, int element) {
    if (element == 0) return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
    if (element == 1) return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E5M2);
    return __nv_cvt_float_to_fp4(x, __NV_E2M1, cudaRoundNearest);
}
__device__ float decode(u8 code, int element) {
    if (element == 2) return __half2float(__half(__nv_cvt_fp4_to_halfraw(code, __NV_E2M1)));
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, element == 0 ? __NV_E4M3 : __NV_E5M2)));
}
extern "C" __global__ void to_e8m0(const float* x, u8* out, i64 n, int up) {
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < n; i += (i64)gridDim.x * blockDim.x)
        out[i] = up ? __nv_cvt_float_to_e8m0(x[i], __NV_SATFINITE, cudaRoundPosInf)
                    : __nv_cvt_float_to_e8m0(x[i], __NV_SATFINITE, cudaRoundZero);
}
extern "C" __global__ void from_e8m0(const u8* codes, float* out, i64 n) {
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < n; i += (i64)gridDim.x * blockDim.x) {
        __nv_bfloat16_raw raw = __nv_cvt_e8m0_to_bf16raw(codes[i]);
        out[i] = __uint_as_float((unsigned)raw.x << 16);
    }
}
extern "C" __global__ void to_codes(const float* x, u8* out, i64 n, int element) {
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < n; i += (i64)gridDim.x * blockDim.x)
        out[i] = encode(x[i], element);
}
extern "C" __global__ void from_codes(const u8* codes, float* out, i64 n, int element) {
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < n; i += (i64)gridDim.x * blockDim.x)
        out[i] = decode(codes[i], element);
}
"""


def headers() -> Path:
    """The folder of CUDA's headers. Raises ImportError where there are none with `HEADERS`."""
    candidates = [Path(os.environ[name], "include") for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    nvcc = shutil.which("nvcc")
    candidates += [Path(nvcc).resolve().parent.parent / "include"] if nvcc else []
    packages = importlib.util.find_spec("nvidia")
    for place in (packages.submodule_search_locations or ()) if packages else ():
        candidates += sorted(Path(place).glob("cu*/include"), reverse=True)
    candidates.append(Path("/usr/local/cuda/include"))
    for folder in candidates:
        if all((folder / name).is_file() for name in HEADERS):
            return folder
    raise ImportError(f"no folder with {' and '.join(HEADERS)}: set CUDA_HOME")


def version(folder: Path) -> str:
    """CUDA's version by its headers, such as ``13.0``."""
    match = re.search(r"#define\s+CUDA_VERSION\s+(\d+)", (folder / "cuda.h").read_text(encoding="utf-8"))
    number = int(match[1]) if match else 0
    return f"{number // 1000}.{number % 1000 // 10}"


def cubin(architecture: str) -> bytes:
    """The kernels, compiled for an architecture such as ``sm_90``; no GPU is needed. Raises RuntimeError."""
    program = _checked(nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"conversions.cu", 0, [], []))
    options = [f"--gpu-architecture={architecture}".encode(), f"-I{headers()}".encode()]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if status:
        log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"NVRTC for {architecture}: {' '.join(log.decode(errors='replace').split())[:300]}")
    image: bytes = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
    nvrtc.nvrtcGetCUBIN(program, image)
    return image


@lru_cache(None)
def _module(device: int) -> Any:
    major, minor = torch.cuda.get_device_capability(device)
    return _checked(driver.cuModuleLoadData(cubin(f"sm_{major}{minor}")))


def launch(name: str, source: Tensor, out: Tensor, *numbers: int) -> Tensor:
    """Run a kernel from a contiguous ``source`` to ``out`` of as many elements, on torch's current stream."""
    count = source.numel()
    if not count:
        return out
    with torch.cuda.device(source.device):
        function = _checked(driver.cuModuleGetFunction(_module(source.device.index or 0), name.encode()))
        values = (source.data_ptr(), out.data_ptr(), count, *numbers)
        types = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_longlong, *(ctypes.c_int for _ in numbers))
        blocks = min(-(-count // THREADS), LARGEST_GRID)
        stream = torch.cuda.current_stream(source.device).cuda_stream
        _checked(driver.cuLaunchKernel(function, blocks, 1, 1, THREADS, 1, 1, 0, stream, (values, types), 0))
    return out


def to_e8m0(x: Tensor, *, up: bool) -> Tensor:
    """FP32 numbers to UE8M0 codes, rounded toward +inf or toward zero."""
    x = x.contiguous()
    return launch("to_e8m0", x, torch.empty(x.shape, dtype=torch.uint8, device=x.device), int(up))


def from_e8m0(codes: Tensor) -> Tensor:
    """UE8M0 codes to FP32."""
    codes = codes.contiguous()
    return launch("from_e8m0", codes, torch.empty(codes.shape, dtype=torch.float32, device=codes.device))


def to_codes(x: Tensor, element: str) -> Tensor:
    """FP32 numbers to codes of E4M3, E5M2 or E2M1, one a byte, to nearest and saturating."""
    x = x.contiguous()
    return launch("to_codes", x, torch.empty(x.shape, dtype=torch.uint8, device=x.device), ELEMENTS[element])


def from_codes(codes: Tensor, element: str) -> Tensor:
    """Codes, one a byte, to FP32."""
    codes = codes.contiguous()
    out = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    return launch("from_codes", codes, out, ELEMENTS[element])


def _checked(result: Any) -> Any:
    status, *values = result
    if status:
        raise RuntimeError(f"CUDA: {status!r}")
    return values[0] if len(values) == 1 else tuple(values)
