"""The tree of `.ci/kernels`, as Hugging Face's `kernels` loads it without a network."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import ds_sparse

ROOT = Path(__file__).parents[1]
HIDDEN = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name == "ds_sparse":
            raise ModuleNotFoundError("ds_sparse is not installed")

sys.meta_path.insert(0, Hidden())
"""
LOADED = """
import torch
from kernels import get_kernel, get_loaded_kernels

kernel = get_kernel("org/ds_sparse", version=0, backend="cpu")
metadata, folder = get_loaded_kernels()[0].metadata, kernel.__path__[0]
"""


def make_tree(output: Path, *arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / ".ci" / "kernels", *map(str, arguments), "--output", output]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def run(code: str, tree: Path) -> str:
    places = {"LOCAL_KERNELS": f"org/ds_sparse={tree}", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env=os.environ | places, capture_output=True, text=True, check=False)
    assert not result.returncode, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("kernels") / "tree"
    result = make_tree(output)
    assert not result.returncode, result.stderr
    return output


@pytest.fixture(scope="module")
def cached(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree as the hub's cache has it: each file is a link to one that a hash names, all in one folder."""
    cache = tmp_path_factory.mktemp("cache")
    for number, path in enumerate(path for path in tree.rglob("*") if path.is_file()):
        link = cache / "snapshot" / path.relative_to(tree)
        link.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, cache / f"{number:064x}")
        link.symlink_to(cache / f"{number:064x}")
    return cache / "snapshot"


def test_kernels_loads_it_where_ds_sparse_is_not_installed(cached: Path):
    code = """
from torch.nn.functional import scaled_dot_product_attention

assert kernel.__file__ == f"{folder}/__init__.py" and metadata.id == kernel.__name__
metadata.digest.validate(type(metadata.digest).hash_variant(metadata.digest.algorithm, folder))

torch.manual_seed(0)
operands = [torch.randn(2, 3, 64, 16, dtype=torch.float64, requires_grad=True) for _ in range(3)]
layout = kernel.BigBirdSparsityConfig(num_heads=3, block=16, num_random_blocks=0, num_sliding_window_blocks=1)
layout = layout.make_layout(64)
seen = layout.bool().repeat_interleave(16, 1).repeat_interleave(16, 2)
assert not seen.all()
results = []
for attention in (
    lambda q, k, v: kernel.block_sparse_attention(q, k, v, layout, block=16),
    lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=seen),
):
    output = attention(*operands)
    results.append((output, *torch.autograd.grad(output.square().sum(), operands)))
for ours, dense in zip(*results, strict=True):
    torch.testing.assert_close(ours, dense, rtol=1e-10, atol=1e-10)

import ds_sparse
assert ds_sparse is kernel
from ds_sparse.modules.self_attention import SparseSelfAttention
assert SparseSelfAttention is kernel.SparseSelfAttention
print(folder)
"""
    assert run(HIDDEN + LOADED + code, cached).startswith(f"{cached}/build/torch-stable-abi211-cpu-")


@pytest.mark.slow("imports torch in another process")
def test_beside_one_that_is_imported_it_is_refused_and_that_one_goes_on(tree: Path):
    code = """
import ds_sparse, ds_sparse.ops

try:
    get_kernel("org/ds_sparse", version=0, backend="cpu")
except ImportError as error:
    print(error)
print(ds_sparse.__path__[0])
import torch
import ds_sparse
q = torch.ones(1, 1, 16, 8)
assert torch.equal(ds_sparse.block_sparse_attention(q, q, q, torch.ones(1, 1), block=16), q)
"""
    sentence, first = run("from kernels import get_kernel" + code, tree).splitlines()
    said = f"ds_sparse is imported from {first}, and a process has one; use that one, or load the one "
    assert sentence.startswith(said) and f" in {tree}/build/" in sentence


def test_kernel_builder_is_told_of_every_source_once_and_of_the_flags_of_chips(tree: Path):
    told = tomllib.loads((tree / "build.toml").read_text())
    assert told["torch"]["stable-abi"] == {"cpu": "2.11", "cuda": "2.11"}
    there = {str(path.relative_to(tree)) for path in tree.glob("csrc/**/*.*")}
    for backend, suffixes in ("cuda", (".h", ".cpp", ".cu")), ("cpu", (".h", ".cpp")):
        tables = [told["torch"], *(table for table in told["kernel"].values() if table["backend"] == backend)]
        sources = [source for table in tables for source in table["src"]]
        assert len(sources) == len(set(sources))
        wanted = {path for path in there if path.endswith(suffixes)}
        assert set(sources) == wanted | {"torch-ext/torch_binding.cpp"}
    kernels = told["kernel"]
    assert kernels["cuda_portable"]["cuda-capabilities"] == ["8.0", "9.0", "10.0", "12.0"]
    assert kernels["cuda_sm90"]["cuda-capabilities"] == ["9.0a"]
    assert all(source.endswith("_sm90.cu") for source in kernels["cuda_sm90"]["src"])
    if platform.machine() == "x86_64":
        for name in ("cpu_avx2", "cuda_cpu_avx2"):
            assert kernels[name]["src"] == ["csrc/cpu/kernels_avx2.cpp"]
            assert "-mavx2" in kernels[name]["cxx-flags"]


@pytest.mark.slow("imports all, transformers too, in another process")
def test_the_sources_work_as_another_module_with_the_operators_that_kernel_builder_names(tree: Path, tmp_path: Path):
    """kernel-builder compiles the library, writes `_ops.py` beside the modules, and names both after the build."""
    (built,) = tree.glob("build/*-cpu-*")
    variant = tmp_path / built.name
    shutil.copytree(tree / "torch-ext" / "ds_sparse", variant)
    (variant / "_ops.py").write_text(f"""
import torch, types
torch.ops.load_library({str(built / "lib" / "libds_sparse_cpu.so")!r})
ops = torch.ops.ds_sparse
ds_sparse = types.ModuleType("ds_sparse")
ds_sparse.__file__ = "library.abi3.so"
def add_op_namespace_prefix(op_name):
    return f"ds_sparse::{{op_name}}"
""")
    metadata = json.loads((built / "metadata.json").read_text()) | {"id": "_ds_sparse_cpu_abc1234"}
    del metadata["digest"]
    (variant / "metadata.json").write_text(json.dumps(metadata))
    code = """
assert kernel.__name__ == "_ds_sparse_cpu_abc1234"
for name in kernel.__all__:
    if kernel._PUBLIC[name] != "integrations.deepspeed":
        getattr(kernel, name)
q = torch.ones(1, 1, 16, 8)
assert torch.equal(kernel.block_sparse_attention(q, q, q, torch.ones(1, 1), block=16), q)
import transformers
sizes = dict(vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64)
config = transformers.BertConfig(**sizes, sparse_attention={"mode": "fixed"})
model = transformers.AutoModel.from_config(config, attn_implementation="ds_sparse")
model(torch.ones(1, 64, dtype=torch.long)).last_hidden_state.sum().backward()
assert "ds_sparse" not in sys.modules
"""
    run(HIDDEN + LOADED + code, tmp_path)


def test_a_wheel_gives_a_variant_for_each_backend_of_its_libraries(tmp_path: Path):
    wheel = tmp_path / "ds_sparse.whl"
    with zipfile.ZipFile(wheel, "w") as files:
        for name in ("__init__.py", "cli/run.py", "lib/libds_sparse_cpu.so", "lib/libds_sparse_cuda.so"):
            files.writestr(f"ds_sparse/{name}", "as in the wheel")
        files.writestr("ds_sparse/launcher/__init__.py", "")
    result = make_tree(tmp_path / "tree", wheel)
    assert not result.returncode, result.stderr
    metadata = {path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("tree/build/*/metadata.json")}
    found = {name.split("-")[3]: of_variant for name, of_variant in metadata.items()}
    assert found.keys() == {"cpu", "cu126", "cu130"}
    assert found["cpu"]["backend"] == {"type": "cpu"}
    assert found["cu126"]["backend"] == {"type": "cuda", "archs": ["8.0", "9.0", "10.0", "12.0"]}
    assert found["cpu"]["digest"]["files"].keys() == {"__init__.py", "lib/libds_sparse_cpu.so"}
    libraries = {"lib/libds_sparse_cpu.so", "lib/libds_sparse_cuda.so"}
    assert found["cu130"]["digest"]["files"].keys() == {"__init__.py", *libraries}


def test_without_a_library_it_says_how_to_get_one(tmp_path: Path):
    wheel = tmp_path / "other.whl"
    with zipfile.ZipFile(wheel, "w") as files:
        files.writestr("other/__init__.py", "")
    result = make_tree(tmp_path / "tree", wheel)
    assert result.returncode
    assert result.stderr == (
        f"{wheel} has no ds_sparse/lib/libds_sparse_cpu.so; build it here with `pip install --no-build-isolation "
        "-e .`, or name a wheel of ds_sparse.\n"
    )
    assert not (tmp_path / "tree").exists()
    result = make_tree(tmp_path / "tree", tmp_path / "absent.whl")
    assert f"{tmp_path}/absent.whl is no wheel; make one with `bash .ci/wheel`, or leave it out." in result.stderr


def test_transformers_is_told_which_name_to_give_where_it_takes_ds_sparse_for_flash_attention():
    with pytest.raises(ImportError, match='load it with kernels.get_kernel.* and give attn_implementation="ds_sparse"'):
        hasattr(ds_sparse, "flash_attn_varlen_func")
