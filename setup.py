"""Builds csrc/ into ds_sparse/lib: libds_sparse_cpu.so always, libds_sparse_cuda.so where it can be used.

DS_SPARSE_CUDA=1 builds the CUDA library (nvcc has to be there), DS_SPARSE_CUDA=0 never does; unset, it is built when
nvcc is found, and a GPU or TORCH_CUDA_ARCH_LIST. It is compiled for what that names, else for the GPUs of this machine.
CXX and CUDA_HOME choose the compilers, MAX_JOBS how many run at a time. Compilers are called directly: torch's
CUDAExtension refuses beside a CPU-only torch, and with the stable ABI nothing else of it is needed.

DS_SPARSE_WHEEL=1 is .ci/wheel's: machine code for all the chips of the wheel, linked for an older glibc.
"""

import ctypes
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import itertools
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
WHEEL = os.environ.get("DS_SPARSE_WHEEL") == "1"
OBJECTS = ROOT / "build" / ("wheel" if WHEEL else "objects")
CPU, CUDA = "ds_sparse.lib.libds_sparse_cpu", "ds_sparse.lib.libds_sparse_cuda"

GLIBC = "2.28"
"""The oldest that the wheel loads with."""
TORCH_TARGET = "-DTORCH_TARGET_VERSION=0x020b000000000000"
CPU_FLAGS = (
    "-std=c++20 -O3 -fPIC -fvisibility=hidden -Wall -Wno-psabi -Wno-maybe-uninitialized -ffp-contract=fast".split()
)
# The kernels are compiled once for each instruction set and chosen at run time, so that a library runs on any machine.
KERNELS, BF16_KERNELS = CSRC / "cpu" / "kernels.cpp", CSRC / "cpu" / "kernels_bf16.cpp"
AVX512 = "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c".split()
INSTRUCTION_SETS = {KERNELS: {"portable": []}, BF16_KERNELS: {}}
if platform.machine().lower() in ("x86_64", "amd64"):
    INSTRUCTION_SETS[KERNELS] |= {"avx2": "-mavx2 -mfma -mf16c".split(), "avx512": AVX512}
    INSTRUCTION_SETS[BF16_KERNELS] |= {
        "avx512_bf16": [*AVX512, "-mavx512bf16"],
        "amx_bf16": [*AVX512, "-mavx512bf16", "-DDS_SPARSE_TILES"],
    }
CUDA_FLAGS = "-std=c++20 -O3 --expt-relaxed-constexpr -Xcompiler -fPIC,-fvisibility=hidden -DUSE_CUDA".split()
# Long files, which are begun first, and the numbers of the dtypes that they are compiled for one by one
# (csrc/cuda/common/elements.h).
BY_DTYPE = {
    CSRC / "cuda" / "attention" / "backward_sweep.cu": {"fp32": 4, "fp16": 1, "bf16": 2},
    CSRC / "cuda" / "attention" / "backward_columns_sm90.cu": {"fp16": 1, "bf16": 2},
    CSRC / "cuda" / "attention" / "forward_sm90.cu": {"fp16": 1, "bf16": 2},
}
# Compute capabilities, as TORCH_CUDA_ARCH_LIST has them. Machine code for the first of a generation runs on all of it;
# PTX, on later generations; the wheel has none, which would be a fifth of it.
GENERATIONS = {8: "8.0", 9: "9.0", 10: "10.0", 12: "12.0"}
LATER = "9.0+PTX"  # for other generations
NAMES = {"volta": (7,), "turing": (7,), "ampere": (8,), "ada": (8,), "hopper": (9,), "blackwell": (10, 12)}
WHEEL_CAPABILITIES = ["8.0", "9.0", "10.0", "12.0"]
CAPABILITIES_WITHOUT_GPU = ["8.0", "9.0+PTX"]
HOPPER_CAPABILITIES = ["9.0a"]
"""Of sources named *_sm90.cu, which use what only Hopper has."""
if WHEEL:
    CUDA_FLAGS.append("--compress-mode=size")
LICENSE = "Apache-2.0"
VERSION = re.search(r'^__version__ = "(.+)"', (ROOT / "ds_sparse" / "__init__.py").read_text(), re.MULTILINE)[1]
REPOSITORY = ""
"""The address of the repository, from which all URLs of the package follow; .ci/release asks for it."""
PAGES = {"Source": "", "Documentation": "/tree/main/docs", "Changes": "/blob/main/CHANGELOG.md", "Issues": "/issues"}


class BuildLibraries(build_ext):
    """Compiles each Extension's sources with plain compiler calls; recompiles what changed. A second build at the same
    time waits for the first."""

    def run(self) -> None:
        OBJECTS.mkdir(parents=True, exist_ok=True)
        with (OBJECTS / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print("ds_sparse: another build is under way; this one goes on when that has ended", flush=True)
                fcntl.flock(lock, fcntl.LOCK_EX)
            super().run()

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def build_extension(self, extension: Extension) -> None:
        target = Path(self.get_ext_fullpath(extension.name))
        library = build_cuda_library() if extension.name == CUDA else build_cpu_library()
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(library, target)

    def copy_extensions_to_source(self) -> None:
        (ROOT / "ds_sparse" / "lib").mkdir(exist_ok=True)
        super().copy_extensions_to_source()
        if CUDA not in [extension.name for extension in self.extensions]:
            remove_what_is_not_built(ROOT / "ds_sparse" / "lib" / "libds_sparse_cuda.so")


def remove_what_is_not_built(library: Path) -> None:
    """Torch would load it beside the other one, whatever has changed since."""
    if library.exists():
        library.unlink()
        print(
            f"ds_sparse: removed {library.name}, which is of an earlier build; DS_SPARSE_CUDA=1 builds it", flush=True
        )


def build_cpu_library() -> Path:
    compiler, torch = find_cxx(), find_torch()
    base = [compiler, *CPU_FLAGS, *common_flags(torch)]
    steps = []
    for source in cpu_sources():
        for name, flags in INSTRUCTION_SETS.get(source, {"": []}).items():
            define = [f"-DDS_SPARSE_ISA={name}"] if name else []
            steps.append((source, name, [*base, *define, *flags, "-c", str(source)]))
    libraries = [f"-L{torch / 'lib'}", "-Wl,--no-as-needed", "-ltorch_cpu", "-lc10", *system_libraries(compiler)]
    return build_library("libds_sparse_cpu.so", steps, [compiler, "-shared", "-s"], libraries)


def build_cuda_library() -> Path:
    compiler, nvcc, torch = find_cxx(), find_nvcc(), find_torch()
    nvcc = [nvcc, "-ccbin", compiler]
    # 0: one file with as many threads as there are cores. It leaves machine code as it is.
    of_file = "--split-compile=1" if os.environ.get("MAX_JOBS") else "--split-compile=0"
    base = [*nvcc, of_file, *CUDA_FLAGS, *common_flags(torch, "-Xcompiler")]
    steps = []
    capabilities = cuda_capabilities()
    for source in [*BY_DTYPE, *(source for source in cuda_sources() if source not in BY_DTYPE)]:
        targets = targets_of(HOPPER_CAPABILITIES if source.stem.endswith("_sm90") else capabilities)
        for name, number in BY_DTYPE.get(source, {"": 0}).items():
            define = [f"-DDS_SPARSE_DTYPES={number}"] if name else []
            steps.append((source, name, [*base, *define, *targets, "-c", str(source)]))
    libraries = [f"-L{torch / 'lib'}", "-Wl,--no-as-needed", "-ltorch_cpu", "-lc10", "-ltorch_cuda"]
    if not (torch / "lib" / "libtorch_cuda.so").exists():
        libraries.insert(0, f"-L{empty_torch_cuda(compiler)}")
    libraries += [*cuda_runtime(nvcc), *system_libraries(compiler)]
    library = build_library("libds_sparse_cuda.so", steps, [compiler, "-shared", "-s"], libraries)
    library.with_suffix(".capabilities").write_text(" ".join(capabilities))  # for .ci/kernels
    return library


def cuda_capabilities() -> list[str]:
    """What portable sources are compiled for."""
    if WHEEL:
        return WHEEL_CAPABILITIES
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
    found = set()
    for word in listed or gpus():
        parts = re.fullmatch(r"(?:(\d+)\.\d[af]?|(\w+))(\+PTX)?", word)
        majors = [int(parts[1])] if parts and parts[1] else NAMES.get(parts[2].lower(), ()) if parts else ()
        if not majors:
            raise SystemExit(
                f"TORCH_CUDA_ARCH_LIST has {word!r}; name compute capabilities of 8.0 and later, as in '8.6 9.0+PTX', "
                "or leave it unset: then it is built for the GPUs of this machine."
            )
        if max(majors) < min(GENERATIONS):
            print(f"ds_sparse: TORCH_CUDA_ARCH_LIST has {word}, and kernels are for 8.0 and later", flush=True)
        for major in majors:
            if major in GENERATIONS:
                found.add(GENERATIONS[major] + (parts[3] or ""))
            elif major > min(GENERATIONS):
                found.add(LATER)
    if listed and not found:
        raise SystemExit("TORCH_CUDA_ARCH_LIST has nothing that kernels are for; add 8.0 or later, or leave it unset.")
    return sorted(found - {x.removesuffix("+PTX") for x in found if "+" in x}) or CAPABILITIES_WITHOUT_GPU


def targets_of(capabilities: list[str]) -> list[str]:
    """nvcc's flags for them."""
    flags = []
    for capability in capabilities:
        number, _, ptx = capability.replace(".", "").partition("+")
        code = f"[sm_{number},compute_{number}]" if ptx else f"sm_{number}"
        flags.append(f"-gencode=arch=compute_{number},code={code}")
    return flags


def gpus() -> list[str]:
    """Compute capabilities of this machine's GPUs that kernels are for, such as 9.0; nothing without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count, device, major, minor = (ctypes.c_int() for _ in range(4))
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    found = set()
    for number in range(count.value):
        driver.cuDeviceGet(ctypes.byref(device), number)
        for value, attribute in ((major, 75), (minor, 76)):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
            driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        if major.value >= min(GENERATIONS):
            found.add(f"{major.value}.{minor.value}")
    return sorted(found)


def common_flags(torch: Path, *for_host: str) -> list[str]:
    """`for_host` goes before flags of the C++ compiler. Messages name files the same way wherever it is built."""
    include = torch / "include"
    places = [flag for folder in (ROOT, include) for flag in (*for_host, f"-ffile-prefix-map={folder}/=")]
    return [*places, TORCH_TARGET, f"-I{CSRC}", "-isystem", str(include)]


def build_library(name: str, steps: list[tuple[Path, str, list[str]]], link: list[str], libraries: list[str]) -> Path:
    """Runs the compile steps (source, variant, command), as many at a time as there are cores, and links."""
    done = itertools.count(1)

    def compiled(step: tuple[Path, str, list[str]]) -> tuple[Path, str]:
        began = time.monotonic()
        target, stamp, is_new = compile_object(*step)
        number, took = next(done), time.monotonic() - began
        said = f"{number}/{len(steps)}: {target.relative_to(OBJECTS)}, {took:.0f} s"
        if is_terminal():
            show_for_now(f"ds_sparse: {name} [{'#' * (20 * number // len(steps)):20}] {said}")
        elif is_new:
            print(f"ds_sparse: {name} {said}", flush=True)
        return target, stamp

    show_for_now(f"ds_sparse: {name} [{'':20}] 0/{len(steps)}")
    try:
        with ThreadPoolExecutor(jobs()) as pool:
            built = list(pool.map(compiled, steps))
    finally:
        show_for_now("")
    library = OBJECTS / name
    link = [*link, "-o", str(library), *(str(path) for path, _ in built), *libraries]
    run_unless_current(link, library, digest(*(stamp.encode() for _, stamp in built), repr(link).encode()))
    return library


def is_terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def show_for_now(line: str) -> None:
    """Shows a line in a terminal in the place of the last one. Not by rich: no build needs more than torch."""
    if is_terminal():
        print(f"\033[K{line[: shutil.get_terminal_size().columns - 1]}", end="\r", flush=True)


def jobs() -> int:
    """How many compilers run at a time."""
    given = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
    if not given.isdecimal() or int(given) == 0:
        raise SystemExit(f"MAX_JOBS is {given!r}; set it to 1 or more, or leave it unset: then it is one a core.")
    return int(given)


def compile_object(source: Path, variant: str, command: list[str]) -> tuple[Path, str, bool]:
    """The object, its stamp, and whether it had to be made."""
    target = OBJECTS / source.relative_to(CSRC).with_suffix(f".{variant}.o" if variant else ".o")
    files = (path.read_bytes() for path in sorted(included_by(source)))
    stamp = digest(*files, repr(command).encode(), importlib.metadata.version("torch").encode())
    return target, stamp, run_unless_current([*command, "-o", str(target)], target, stamp)


def included_by(source: Path) -> set[Path]:
    """The source and the headers of ours that it includes, directly or not."""
    found, new = set(), {source.resolve()}
    while new:
        path = new.pop()
        found.add(path)
        names = re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE)
        new |= {(path.parent / name).resolve() for name in names} - found
    return found


def run_unless_current(command: list[str], target: Path, stamp: str) -> bool:
    """Runs a command that writes `target`, unless the stamp beside the target says that it is from the same inputs;
    returns whether it ran."""
    stamp_file = target.with_name(target.name + ".stamp")
    if target.exists() and stamp_file.exists() and stamp_file.read_text() == stamp:
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    stamp_file.unlink(missing_ok=True)
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if said := result.stdout + result.stderr:
        show_for_now("")
        sys.stderr.write(said)
    target.with_name(target.name + ".log").write_text(said)
    if result.returncode:
        raise SystemExit(f"Building {target.name} failed with status {result.returncode}: {' '.join(command)}")
    stamp_file.write_text(stamp)
    return True


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def find_cxx() -> str:
    for name in [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++", "clang++"]:
        if shutil.which(name):
            return shutil.which(name)
    raise SystemExit(
        "ds_sparse needs a C++ compiler to build; install one (Debian and Ubuntu: apt install g++) or set CXX to it."
    )


def find_torch() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None:
        raise SystemExit(
            "ds_sparse needs torch while it builds; install torch==2.13.0, or leave out --no-build-isolation."
        )
    version = importlib.metadata.version("torch")
    if tuple(map(int, version.split(".")[:2])) < (2, 11):
        raise SystemExit(
            f"ds_sparse builds with torch 2.11 or later, and torch {version} is installed; install torch==2.13.0."
        )
    return Path(spec.submodule_search_locations[0])


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return shutil.which(str(Path(home) / "bin" / "nvcc")) or shutil.which("nvcc")


def wants_cuda() -> bool:
    choice = os.environ.get("DS_SPARSE_CUDA", "")
    if choice not in ("", "0", "1"):
        raise SystemExit(
            f"DS_SPARSE_CUDA is {choice!r}; set it to 1 (build the CUDA library), 0 (do not), or leave it unset."
        )
    if choice == "1" and find_nvcc() is None:
        raise SystemExit(
            "DS_SPARSE_CUDA is 1 and no nvcc was found; install CUDA, set CUDA_HOME, or unset DS_SPARSE_CUDA."
        )
    if choice == "0" or find_nvcc() is None:
        return False  # the driver is not asked for its GPUs, which takes a while
    return choice == "1" or bool(os.environ.get("TORCH_CUDA_ARCH_LIST") or gpus())


def empty_torch_cuda(compiler: str) -> Path:
    """A folder with an empty libtorch_cuda.so to link against; a torch with CUDA brings the real one at run time."""
    folder = OBJECTS / "stub"
    command = [
        compiler,
        "-shared",
        "-fPIC",
        "-xc++",
        os.devnull,
        "-Wl,-soname,libtorch_cuda.so",
        "-o",
        str(folder / "libtorch_cuda.so"),
    ]
    run_unless_current(command, folder / "libtorch_cuda.so", digest(repr(command).encode()))
    return folder


def cuda_runtime(nvcc: list[str]) -> list[str]:
    """The static CUDA runtime, as nvcc links it."""
    said = subprocess.run([*nvcc, "-shared", "--dryrun", "none.o"], capture_output=True, text=True, check=True).stderr
    return [*re.findall(r'"(-L[^"]+)"', re.search("LIBRARIES=(.*)", said)[1]), "-lcudart_static", "-ldl", "-lrt"]


def system_libraries(compiler: str) -> list[str]:
    """Linker flags for what a library needs of the system.

    C++'s own library is shared, as torch's is: a compiler without a libstdc++.so would take a second one in, and the
    first error that has a number in its text would end the process. The wheel's are as they were with glibc 2.28, by
    zig's stand-ins. Where glibc 2.32 has __libc_single_threaded, which headers of C++ read, the wheel has a 0: several
    threads.
    """
    if not WHEEL:
        return ["-l:libstdc++.so.6"]
    empty, source, single = OBJECTS / "glibc" / "empty.so", OBJECTS / "single.c", OBJECTS / "single.o"
    empty.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "ziglang", "cc", "-target", f"x86_64-linux-gnu.{GLIBC}", "-shared", "-v"]
    said = subprocess.run([*command, "-xc", os.devnull, "-o", str(empty)], capture_output=True, text=True, check=True)
    stubs = re.findall(r"\S+/lib(?:m|c|pthread|dl|rt|ld)\.so\.\d|\S+/libc_nonshared\.a", said.stderr)
    source.write_text('char __libc_single_threaded __attribute__((visibility("hidden")));\n')
    subprocess.run([compiler, "-xc", "-fPIC", "-c", str(source), "-o", str(single)], check=True)
    return [str(single), "-nodefaultlibs", "-Wl,--as-needed", "-lstdc++", *stubs, "-lgcc_s", "-lgcc"]


def cpu_sources() -> list[Path]:
    return [CSRC / "library.cpp", *sorted((CSRC / "cpu").glob("*.cpp"))]


def cuda_sources() -> list[Path]:
    return sorted((CSRC / "cuda").rglob("*.cu"))


def header_files() -> list[Path]:
    return sorted(path for pattern in ("*.h", "*.cuh") for path in CSRC.rglob(pattern))


def extension(name: str, sources: list[Path]) -> Extension:
    relative = [[str(path.relative_to(ROOT)) for path in paths] for paths in (sources, header_files())]
    return Extension(name, relative[0], depends=relative[1])


def long_description() -> str:
    """The README for where it stands alone: its links and pictures are this version's in REPOSITORY, if that is set."""
    text = (ROOT / "README.md").read_text()
    if not REPOSITORY:
        return text
    text = re.sub(r'(<img src=")(?!\w+:)', rf"\1{REPOSITORY}/raw/v{VERSION}/", text)
    return re.sub(r"(\]\()(?!\w+:|#)", rf"\1{REPOSITORY}/blob/v{VERSION}/", text)


if __name__ == "__main__":  # .ci/kernels reads the lists above
    setup(
        version=VERSION,
        license=LICENSE,
        long_description=long_description(),
        long_description_content_type="text/markdown",
        project_urls={name: REPOSITORY + page for name, page in PAGES.items()} if REPOSITORY else {},
        packages=[*find_packages(include=["ds_sparse*"]), "ds_sparse.launcher", "ds_sparse.launcher.startup"],
        package_dir={"ds_sparse.launcher": "launcher"},
        ext_modules=[extension(CPU, cpu_sources())] + ([extension(CUDA, cuda_sources())] if wants_cuda() else []),
        cmdclass={"build_ext": BuildLibraries},
    )
