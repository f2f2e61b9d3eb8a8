"""Every kernel compiles for the GPU it is meant for, without one: Triton brings its own
assembler."""

import os
import subprocess
import sys

import pytest

# In a process of its own, because this one has chosen the interpreter.
_COMPILE = """
import importlib, pkgutil, re, subprocess, tempfile, warnings
warnings.simplefilter("ignore")
import engine.kernels.device, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sizes = {"BLOCK": 256, "KERNEL": 4, "DK": 128, "DV": 128, "DK_BLOCK": 128, "DV_BLOCK": 32, "C": 64, "LATENT": 512,
         "ROPE": 64, "LATENT_BLOCK": 512, "ROPE_BLOCK": 64, "H": 16, "K": 32, "KEYS": 128,
         "PAGE": 64, "DIM": 128, "DIM_BLOCK": 128,
         "SHARE": 4, "D": 128, "D_BLOCK": 128, "MASKED": True, "PRECISION": "tf32x3"}
pointers = {"pool": "*bf16", "k": "*bf16", "v": "*bf16", "q": "*bf16", "x": "*bf16", "weight": "*bf16",
            "entries": "*bf16", "cache": "*bf16", "mask": "*u8",
            "first_pages": "*i32", "begins": "*i64", "limits": "*i64", "mask_starts": "*i64",
            "states": "*fp32", "before": "*fp32", "after": "*fp32", "g": "*fp32", "beta": "*fp32",
            "inverses": "*fp32", "removals": "*fp32", "additions": "*fp32", "queries": "*fp32", "faded": "*fp32",
            "scores": "*fp32", "lasts": "*fp32", "pages": "*i64", "offsets": "*i64", "indices": "*i64",
            "sources": "*i64", "targets": "*i64", "slots": "*i64", "starts": "*i64", "stops": "*i64",
            "rows": "*i64", "parents": "*i64", "fresh": "*i1", "firsts": "*i32", "counts": "*i32",
            "row_chunks": "*i32", "keys": "*i32", "index_keys": "*bf16", "head_weights": "*fp32", "tables": "*i64",
            "token_rows": "*i64", "lengths": "*i64"}
outputs = {"delta_step_kernel": "*fp32", "delta_tree_kernel": "*fp32",
           "chunk_scan_kernel": "*fp32", "index_scores_kernel": "*fp32"}
for found in pkgutil.iter_modules(engine.kernels.device.__path__, "engine.kernels.device."):
    module = importlib.import_module(found.name)
    for name, kernel in vars(module).items():
        if not isinstance(kernel, triton.JITFunction) or not name.endswith("_kernel"):
            continue
        constants = {arg: sizes[arg] for arg in kernel.arg_names if arg.isupper()}
        types = {arg: "constexpr" if arg.isupper() else pointers.get(arg, "fp32" if arg == "scale" else "i32")
                 for arg in kernel.arg_names}
        if "out" in types:
            types["out"] = outputs.get(name, "*bf16")
        compiled = triton.compile(ASTSource(fn=kernel, signature=types, constexprs=constants),
                                  target=GPUTarget("cuda", 90, 32), options=vars(module).get("OPTIONS", {}))
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            use = subprocess.run([triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name],
                                 capture_output=True, text=True, check=True).stdout
        print(name, len(compiled.asm["cubin"]), compiled.metadata.shared, re.search("STACK:([0-9]+)", use)[1])
"""
_SHARED_BYTES = 227 << 10  # of one multiprocessor
_STACK_BYTES = (
    2 << 10
)  # of a thread, for what does not fit into its registers; the caches hold so much


@pytest.mark.timeout(300)  # half a minute of one core
def test_every_kernel_compiles_for_hopper_within_its_memories() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    compiled = {
        name: tuple(map(int, sizes)) for name, *sizes in map(str.split, done.stdout.splitlines())
    }
    assert len(compiled) == 13
    for name, (size, shared, stack) in compiled.items():
        assert size > 0, name
        assert shared <= _SHARED_BYTES, name
        assert stack <= _STACK_BYTES, name
