"""What csrc/ takes from torch and from a GPU: what torch 2.11 and the smallest GPUs, for which it is built, have."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from ds_sparse import _ops

ROOT = Path(__file__).resolve().parent.parent
CUDA = ROOT / "csrc" / "cuda"
HEADERS = ("torch/csrc/stable", "torch/headeronly", "torch/csrc/inductor/aoti_torch/c")


def words(text: str) -> set[str]:
    """Of C++: what is neither comment nor string."""
    code = re.sub(r'//[^\n]*|/\*.*?\*/|"(\\.|[^"\\\n])*"', " ", text, flags=re.DOTALL)
    return set(re.findall(r"[A-Za-z_]\w{2,}", code))


def names_of(include: Path) -> set[str]:
    """All words of the headers that csrc/ may use; the file in tests/data has those of torch 2.11.0's wheel."""
    found = (words(path.read_text()) for folder in HEADERS for path in (include / folder).rglob("*.h"))
    return set().union(*found)


NAMES_OF_2_11 = set((ROOT / "tests" / "data" / "torch_2_11_names.txt").read_text().split())


@pytest.fixture(scope="module")
def newer_names() -> set[str]:
    if not torch.__version__.startswith("2.13."):
        pytest.skip("later headers have more words that mean nothing here; torch 2.13's are compared with 2.11's")
    return names_of(Path(torch.__file__).parent / "include") - NAMES_OF_2_11


SOURCES = sorted(path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".h", ".cpp", ".cu"))


def name_of(source: Path) -> str:
    return source.relative_to(ROOT / "csrc").as_posix()


@pytest.mark.parametrize("source", SOURCES, ids=name_of)
def test_a_source_uses_no_name_that_torch_2_11_lacks(source: Path, newer_names: set[str]):
    newer = words(source.read_text()) & newer_names
    assert not newer, f"torch 2.11's headers do not have {sorted(newer)}; use what they have, or other names of our own"


def test_names_newer_than_torch_2_11_are_seen():
    used = words("STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index, &stream)); // torch_new_name")
    assert used - NAMES_OF_2_11 == {"STABLE_TORCH_ERROR_CODE_CHECK"}


def test_a_family_of_kernels_includes_its_own_headers_and_common_ones_alone():
    """A folder of csrc/cuda is a family; what two of them need is in common/, which needs none of them."""
    crossing = []
    for source in (path for path in SOURCES if path.is_relative_to(CUDA)):
        for name in re.findall(r'^#include "(.+)"', source.read_text(), re.MULTILINE):
            header = (source.parent / name).resolve()
            allowed = (source.parent, CUDA / "common", ROOT / "csrc")
            crossing += [] if header.parent in allowed else [f"{name_of(source)} includes {name_of(header)}"]
    assert len({path.parent for path in SOURCES}) > 6
    assert not crossing


def test_no_two_headers_of_kernels_have_one_name_but_each_family_says_what_was_tuned():
    headers = Counter(path.name for path in SOURCES if path.suffix == ".h" and path.is_relative_to(CUDA))
    families = {path.parent for path in SOURCES if path.is_relative_to(CUDA)} - {CUDA / "common"}
    assert {name: count for name, count in headers.items() if count > 1} == {"tuning.h": len(families)}


def test_sources_have_one_style():
    """That of .clang-format, by the version that the extra `test` pins: others may format otherwise."""
    clang_format = pytest.importorskip("clang_format", reason="clang-format is not installed")
    command = [clang_format.get_executable("clang-format"), "--dry-run", "--Werror", *SOURCES]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


OF_CUDA = [
    pytest.mark.slow("without a GPU, --all alone compiles it"),
    pytest.mark.skipif(not _ops.CUDA_LIBRARY.exists(), reason="the CUDA library is not built: there is no nvcc"),
]
LIBRARIES = [
    pytest.param(_ops.CPU_LIBRARY, id=_ops.CPU_LIBRARY.stem),
    pytest.param(_ops.CUDA_LIBRARY, id=_ops.CUDA_LIBRARY.stem, marks=OF_CUDA),
]


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_asks_torch_2_11_for_nothing_newer(library: Path):
    """Symbols that headers bring in by themselves count, too."""
    symbols = {name.decode() for name in re.findall(rb"(?<!\w)(?:aoti_)?torch_\w+(?=\0)", library.read_bytes())}
    assert len(symbols) > 20 and symbols <= NAMES_OF_2_11
    # With one of its own, an error that has a number in its text would end the process.
    assert b"\0libstdc++.so.6\0" in library.read_bytes()


PORTABLE = [path for path in SOURCES if "with_shared_memory(" in path.read_text() and "_sm90" not in path.stem]


@pytest.mark.parametrize("source", [path for path in PORTABLE if path.suffix == ".cu"], ids=name_of)
def test_a_portable_kernel_takes_no_more_shared_memory_than_the_smallest_gpu_has(source: Path):
    """Each launch has an assertion of the compiler's, or asks how much there is."""
    text = source.read_text()
    bounds = re.findall(r"static_assert\([^;]*<= kPortableMemory|with_\w*memory<|<= launch.shared_memory\(\)", text)
    assert len(bounds) >= text.count("with_shared_memory(")


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch):
    """A function of setup.py, on a machine with such GPUs."""

    def function(name: str, gpus: tuple[str, ...] = ()):
        found = runpy.run_path(str(ROOT / "setup.py"))[name]
        monkeypatch.setitem(found.__globals__, "gpus", lambda: list(gpus))
        monkeypatch.setitem(found.__globals__, "find_nvcc", lambda: "nvcc")
        return found

    return function


WITHOUT_GPU = ["8.0", "9.0+PTX"]


@pytest.mark.parametrize(
    "listed, gpus, compiled",
    [
        ("", (), WITHOUT_GPU),
        ("", ("9.0",), ["9.0"]),
        ("", ("8.6", "8.9"), ["8.0"]),
        ("", ("8.0", "12.0"), ["12.0", "8.0"]),
        ("", ("11.0",), ["9.0+PTX"]),
        ("11.0", (), ["9.0+PTX"]),
        ("8.6", ("9.0",), ["8.0"]),
        ("8.0;9.0a+PTX", (), WITHOUT_GPU),
        ("9.0 9.0+PTX", (), ["9.0+PTX"]),
        ("Hopper", (), ["9.0"]),
        ("7.5 Turing 8.0", (), ["8.0"]),
    ],
)
def test_the_cuda_library_is_compiled_for_the_gpus_that_are_asked_for_or_there(
    setup, monkeypatch, listed: str, gpus: tuple[str, ...], compiled: list[str]
):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    assert setup("cuda_capabilities", gpus)() == compiled


@pytest.mark.parametrize(
    "listed, said",
    [("Hoper", "has 'Hoper'; name compute"), ("8.0+P", "has '8.0\\+P'; name"), ("7.5", "nothing that kernels are for")],
)
def test_gpus_without_kernels_are_refused_before_anything_is_compiled(setup, monkeypatch, listed: str, said: str):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    with pytest.raises(SystemExit, match=said):
        setup("cuda_capabilities")()


def test_nvcc_gets_machine_code_and_ptx_for_them(setup):
    code = ["arch=compute_80,code=sm_80", "arch=compute_90,code=[sm_90,compute_90]"]
    assert setup("targets_of")(WITHOUT_GPU) == [f"-gencode={x}" for x in code]


ASKED = [("", "", (), False), ("", "", ("9.0",), True), ("", "9.0", (), True), ("1", "", (), True)]


@pytest.mark.parametrize("choice, listed, gpus, wanted", [*ASKED, ("0", "9.0", ("9.0",), False)])
def test_the_cuda_library_is_built_where_a_gpu_is_or_it_is_asked_for(setup, monkeypatch, choice, listed, gpus, wanted):
    monkeypatch.setenv("DS_SPARSE_CUDA", choice)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    assert setup("wants_cuda", gpus)() is wanted


@pytest.mark.parametrize("jobs", ["0", "two"])
def test_a_number_of_jobs_that_is_none_is_refused(setup, monkeypatch, jobs: str):
    monkeypatch.setenv("MAX_JOBS", jobs)
    with pytest.raises(SystemExit, match=f"MAX_JOBS is '{jobs}'; set it to 1 or more"):
        setup("jobs")()


@pytest.mark.parametrize("in_terminal", [False, True])
def test_compiling_says_how_far_it_is(setup, monkeypatch, tmp_path, capsys, in_terminal: bool):
    build = setup("build_library")
    monkeypatch.setitem(build.__globals__, "OBJECTS", tmp_path)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("sys.stdout.isatty", lambda: in_terminal)
    source = ROOT / "csrc" / "library.cpp"
    write = [sys.executable, "-c", "import sys; open(sys.argv[-1], 'w')"]
    build("lib.so", [(source, name, write) for name in ("one", "two")], ["sh", "-c", 'touch "$1"'], [])
    out = capsys.readouterr().out
    if not in_terminal:
        assert re.sub("one|two", "x", out) == "".join(f"ds_sparse: lib.so {n}/2: library.x.o, 0 s\n" for n in (1, 2))
        return
    shown = out.split("\r")
    assert all(line.startswith("\x1b[K") and len(line) < 64 for line in shown[:-1]) and "\n" not in out
    assert [line.count("#") for line in shown] in ([0, 10, 20, 0, 0], [0, 20, 10, 0, 0]), "two threads are done"
    assert shown[-2:] == ["\x1b[K", ""], "it goes at the end"


@pytest.mark.slow("reads what the compiler said of the CUDA library")
def test_no_kernel_waits_for_each_product():
    """ptxas says it, and compiles all the same: such a kernel can take ten times as long. One does, known and slow: the
    sweep by rows with options."""
    objects = list((ROOT / "build" / "objects" / "cuda").rglob("*_sm90*.o"))
    said = [log.read_text() for log in (Path(f"{path}.log") for path in objects) if log.exists()]
    if not objects or len(said) < len(objects):
        pytest.skip(f"the compiler's words are kept for {len(said)} of {len(objects)} objects here")
    serialized = re.findall(r"instructions are serialized .* function '(\S+)'", "".join(said))
    options = "rows_on_hopper_kernel.*ScoresE4E"  # kOptions of scores_sm90.h
    slow = [name for name in serialized if not re.search(options, name)]
    assert not slow, "the multiprocessor's pipeline of products is empty between two; see what the message says"


def test_a_library_that_is_no_longer_built_does_not_stay(setup, tmp_path, capsys):
    library = tmp_path / "libds_sparse_cuda.so"
    library.write_bytes(b"of an earlier build")
    setup("remove_what_is_not_built")(library)
    assert not library.exists() and "is of an earlier build" in capsys.readouterr().out
    setup("remove_what_is_not_built")(library)
    assert not capsys.readouterr().out
