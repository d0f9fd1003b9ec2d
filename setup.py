"""Builds esp_kernels._C (CPU ops) with the compiler at hand.

Run pip with --no-build-isolation, so that the installed torch is the one built against. Without torch or a
compiler the package still installs; its ops then run on the PyTorch reference and `esp doctor` says so.

ESP_BUILD_CPU=auto|0|1   1 makes a failed build an error (CI), 0 skips it
ESP_SANITIZE=1           ASan and UBSan build (see `make sanitize`)
"""

import glob
import os
import sys

from setuptools import find_packages, setup

BUILD_CPU = os.environ.get("ESP_BUILD_CPU", "auto")
SANITIZE = os.environ.get("ESP_SANITIZE", "0") == "1"


def cpu_extension():
    from torch.utils.cpp_extension import CppExtension

    flags = ["-O3", "-g0", "-std=c++20", "-fopenmp", "-fvisibility=hidden", "-DPy_LIMITED_API=0x030A0000"]
    links = ["-fopenmp"]
    if SANITIZE:
        flags += ["-O1", "-g1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-DESP_NO_CLONES"]
        flags += ["-fno-sanitize-recover=undefined", "-march=x86-64-v3"]
        links += ["-fsanitize=address,undefined"]
    return CppExtension(
        "esp_kernels._C",
        sorted(glob.glob("csrc/*.cpp") + glob.glob("csrc/cpu/*.cpp")),
        include_dirs=[os.path.abspath("csrc/include"), os.path.abspath("csrc")],
        extra_compile_args=flags,
        extra_link_args=links,
        py_limited_api=True,
    )


def build_command():
    from torch.utils.cpp_extension import BuildExtension

    class Build(BuildExtension):
        def run(self):
            try:
                super().run()
            except Exception as error:
                if BUILD_CPU == "1":
                    raise
                print(f"esp_kernels: native ops are not built: {error}", file=sys.stderr)

    return Build


native = {}
if BUILD_CPU != "0":
    try:
        native = {"ext_modules": [cpu_extension()], "cmdclass": {"build_ext": build_command()}}
    except ImportError as error:
        if BUILD_CPU == "1":
            raise
        print(f"esp_kernels: native ops are not built: {error}", file=sys.stderr)

setup(
    packages=find_packages(include=["esp_kernels*"]) + find_packages("python"),
    package_dir={"esp_decode": "python/esp_decode"},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
    **native,
)
