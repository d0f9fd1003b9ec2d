"""Builds esp_kernels._C (CPU ops) and esp_kernels._cuda (CUDA ops) with the compilers at hand.

Run pip with --no-build-isolation, so that the installed torch is the one built against. Without torch or a
compiler the package still installs; its ops then run on other backends and `esp doctor` says so.

ESP_BUILD_CPU=auto|0|1   1 makes a failed build an error (CI), 0 skips it
ESP_BUILD_CUDA=auto|0|1  the same; auto builds where nvcc is, in CUDA_HOME (/usr/local/cuda) or on PATH
ESP_SANITIZE=1           ASan and UBSan build (see `make sanitize`)
"""

import glob
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from setuptools import find_packages, setup

BUILD_CPU = os.environ.get("ESP_BUILD_CPU", "auto")
BUILD_CUDA = os.environ.get("ESP_BUILD_CUDA", "auto")
SANITIZE = os.environ.get("ESP_SANITIZE", "0") == "1"

FLAGS = ["-O3", "-g0", "-std=c++20", "-fvisibility=hidden", "-DPy_LIMITED_API=0x030A0000"]
INCLUDES = [os.path.abspath("csrc/include"), os.path.abspath("csrc")]

# A100, H100 and H200, B200; others since sm_80 compile the PTX when they first run it.
GENCODES = [
    "arch=compute_80,code=[sm_80,compute_80]",
    "arch=compute_90a,code=sm_90a",
    "arch=compute_100a,code=sm_100a",
]


def cpu_extension():
    from torch.utils.cpp_extension import CppExtension

    flags, links = [*FLAGS, "-fopenmp"], ["-fopenmp"]
    if SANITIZE:
        flags += ["-O1", "-g1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-DESP_NO_CLONES"]
        flags += ["-fno-sanitize-recover=undefined", "-march=x86-64-v3"]
        links += ["-fsanitize=address,undefined"]
    return CppExtension(
        "esp_kernels._C",
        sorted(glob.glob("csrc/*.cpp") + glob.glob("csrc/cpu/*.cpp")),
        include_dirs=INCLUDES,
        extra_compile_args=flags,
        extra_link_args=links,
        py_limited_api=True,
    )


def find_nvcc():
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc", path=os.path.join(home, "bin")) or shutil.which("nvcc")


def cuda_extension(nvcc):
    """The binding; the kernels themselves see no torch header and are compiled by `compile_kernels`."""
    from torch.utils.cpp_extension import TORCH_LIB_PATH, CppExtension

    links = ["-L" + os.path.join(os.path.dirname(os.path.dirname(nvcc)), "lib64")]
    links += ["-lcudart_static", "-ldl", "-lrt", "-lpthread"]
    if os.path.exists(os.path.join(TORCH_LIB_PATH, "libtorch_cuda.so")):
        links += ["-Wl,--no-as-needed", "-ltorch_cuda"]  # its stream getter is a weak symbol
    return CppExtension(
        "esp_kernels._cuda",
        ["csrc/cuda/register.cpp", "csrc/cuda/module.cpp"],
        include_dirs=INCLUDES,
        extra_compile_args=FLAGS,
        extra_link_args=links,
        py_limited_api=True,
    )


def compile_kernels(nvcc, folder):
    os.makedirs(folder, exist_ok=True)

    def compiled(source):
        target = os.path.join(folder, os.path.basename(source) + ".o")
        command = [nvcc, "-std=c++20", "-O3", "-lineinfo", "-Xcompiler=-fPIC,-fvisibility=hidden"]
        command += [f"-gencode={one}" for one in GENCODES] + [f"-I{path}" for path in INCLUDES]
        subprocess.run([*command, "-c", source, "-o", target], check=True)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compiled, sorted(glob.glob("csrc/cuda/*.cu"))))


def build_command(nvcc):
    from torch.utils.cpp_extension import BuildExtension

    class Build(BuildExtension):
        def run(self):
            wanted, compiler = self.extensions, self.compiler
            for extension in wanted:
                cuda = extension.name.endswith("_cuda")
                self.extensions, self.compiler = [extension], compiler
                try:
                    if cuda:
                        extension.extra_objects = compile_kernels(nvcc, os.path.join(self.build_temp, "cuda"))
                    super().run()
                except Exception as error:
                    if (BUILD_CUDA if cuda else BUILD_CPU) == "1":
                        raise
                    print(f"esp_kernels: {extension.name} is not built: {error}", file=sys.stderr)
            self.extensions = wanted

    return Build


def native():
    nvcc = find_nvcc() if BUILD_CUDA != "0" and not SANITIZE else None
    if nvcc is None and BUILD_CUDA == "1":
        raise RuntimeError("ESP_BUILD_CUDA=1 needs nvcc in CUDA_HOME/bin or on PATH")
    try:
        extensions = [cpu_extension()] if BUILD_CPU != "0" else []
        extensions += [cuda_extension(nvcc)] if nvcc else []
        return (
            {"ext_modules": extensions, "cmdclass": {"build_ext": build_command(nvcc)}} if extensions else {}
        )
    except ImportError as error:
        if "1" in (BUILD_CPU, BUILD_CUDA):
            raise
        print(f"esp_kernels: native ops are not built: {error}", file=sys.stderr)
        return {}


setup(
    packages=find_packages(include=["esp_kernels*"]) + find_packages("python"),
    package_dir={"esp_decode": "python/esp_decode"},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
    **native(),
)
