"""Memory that a kernel has the address of outlives it: what no reader of one file can see, held for
all of them."""

import ast
from collections.abc import Iterator, Mapping

from tests.architecture.source import modules

HOST_KERNELS = "engine.kernels.host."


def addresses_of_arrays(trees: Mapping[str, ast.Module]) -> set[str]:
    """Yield functions that take an array's address, numba's way included."""
    return {
        f"{name}.{function.name}"
        for name, tree in trees.items()
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and node.attr == "ctypes"
    }


def addresses_of_temporaries(trees: Mapping[str, ast.Module]) -> Iterator[str]:
    """Yield addresses of unnamed tensors: the memory is freed after the expression."""
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "data_ptr"
            ):
                owner = node.func.value
                if not isinstance(owner, ast.Name | ast.Attribute):
                    yield f"{name}:{node.lineno}"


def host_kernels() -> dict[str, ast.Module]:
    return {name: tree for name, tree in modules("engine").items() if name.startswith(HOST_KERNELS)}


def test_no_compiled_code_takes_the_address_of_an_array_of_its_own() -> None:
    """numba frees an array after the last use of its variable, and an address is no use. A kernel's
    memory is its seat (`take_seat`), which the launch holds."""
    assert addresses_of_arrays(host_kernels()) == {"engine.kernels.host.codegen.compiled.launch"}


def test_no_kernel_gets_the_address_of_a_tensor_without_a_name() -> None:
    assert list(addresses_of_temporaries(modules("engine", "models", "pool", "transfer"))) == []


def test_the_readers_see_both_faults() -> None:
    trees = {
        "here": ast.parse("""
def work(pointer):
    memory = np.zeros(64, np.uint8)
    use(memory.ctypes.data)

def start(x):
    launch_integers(kernel, 1, (x.contiguous().data_ptr(), x[1:].data_ptr(), x.data_ptr()), team)
""")
    }
    assert addresses_of_arrays(trees) == {"here.work"}
    assert list(addresses_of_temporaries(trees)) == ["here:7", "here:7"]
