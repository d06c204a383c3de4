"""Ahead-of-time compilation of recorded launches, on a machine without a GPU, and analysis of the compiled kernels.

:func:`~gckernels.toolkit.kernels.launch.record_launches` records the kernels and arguments of a launcher.
:func:`compile_launch` compiles a recorded launch for a compute capability exactly as the launch itself would: Triton's
binder specialises the arguments (divisibility by 16, integers equal to 1, None). :func:`assemble_for_amd` does so for
AMD's GPUs. :func:`lower_launch` only runs the first stages of compilation, which find most errors in a tenth of the
time. All of them need a process without ``TRITON_INTERPRET``. Triton's cache (``TRITON_CACHE_DIR``) keeps compiled
kernels and the facts about them. Its key has the text of the kernel and of all functions that it calls, the specialised
arguments, options, target and release of Triton and, for facts, the text of this module.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import multiprocessing
import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime import driver
from triton.runtime.cache import get_cache_manager
from triton.runtime.jit import JITFunction, create_function_from_signature

from gckernels.toolkit.kernels.launch import Launch

TARGETS = (80, 90, 100)  # compute capabilities: A100; H100 and H200; B200
AMD = ("gfx90a", "gfx942", "gfx950")  # MI200; MI300; MI350
INSTRUCTION_NBYTES = 16  # from sm_70 on


@dataclass(frozen=True)
class Access:
    """Instructions that access memory through one of a kernel's pointers.

    Attributes:
        argument: name of the kernel's argument that the address comes from, ``"?"`` if it is not known.
        kind: ``"load"``, ``"store"`` or ``"atomic"``.
        nbytes: bytes per thread and instruction; 16 is the most efficient.
        count: number of such instructions in the program; one in a loop counts once.
    """

    argument: str
    kind: str
    nbytes: int
    count: int


@dataclass(frozen=True)
class Compiled:
    """Facts about one launch, compiled for one compute capability.

    Attributes:
        kernel: name of the Triton function.
        capability: 80, 90 or 100.
        num_warps: warps per program.
        registers: registers per thread.
        stack_nbytes: bytes of stack per thread, which has the spilled registers.
        local_loads, local_stores: instructions that access spilled registers.
        shared_nbytes: shared memory per program.
        instructions: machine instructions (SASS) in the kernel's text; padding makes the number a multiple of 8. A loop
            counts once, and so does every branch, such as that of the last, partial tile.
        tile_numel: elements of the program's tile, the maximum that one load or store of the kernel addresses.
        accesses: accesses to global memory.
    """

    kernel: str
    capability: int
    num_warps: int
    registers: int
    stack_nbytes: int
    local_loads: int
    local_stores: int
    shared_nbytes: int
    instructions: int
    tile_numel: int
    accesses: tuple[Access, ...]

    @property
    def spills(self) -> bool:
        """Whether registers were spilled to memory."""
        return bool(self.stack_nbytes or self.local_loads or self.local_stores)

    @property
    def instructions_per_element(self) -> float:
        """``instructions`` times the threads of a program over ``tile_numel``.

        It does not measure time, because loops count once and alternative branches all count. It compares a kernel with
        earlier versions of itself, even if the tile or the number of warps has changed.
        """
        return self.instructions * self.num_warps * 32 / self.tile_numel

    def count(self, argument: str, kind: str, smallest: int = 1, largest: int = 16) -> int:
        """Instructions of that kind, of ``smallest`` to ``largest`` bytes, through the argument of that name."""
        return sum(
            access.count
            for access in self.accesses
            if access.argument == argument and access.kind == kind and smallest <= access.nbytes <= largest
        )


def compile_launch(launch: Launch, capability: int) -> Compiled:
    """Compile ``launch`` for the compute capability, e.g. 90, and read the result.

    Raises:
        RuntimeError: Triton runs its interpreter in this process (``TRITON_INTERPRET``).
        triton.CompilationError: the kernel does not compile.
    """
    signature, compiled = _compiled(launch, capability)
    cache = get_cache_manager(hashlib.sha256(f"{compiled.hash} {_reader()}".encode()).hexdigest())
    path = cache.get_file(_FACTS)
    if path is not None:
        return _from_json(Path(path).read_text())
    facts = _read(launch, capability, signature, compiled)
    cache.put(json.dumps(dataclasses.asdict(facts)), _FACTS, binary=False)
    return facts


def disassemble(launch: Launch, capability: int) -> str:
    """The machine code of ``launch`` for a compute capability, as ``nvdisasm -c`` prints it; see ``sass.py``.

    Raises:
        RuntimeError, triton.CompilationError: as :func:`compile_launch`.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(_compiled(launch, capability)[1].asm["cubin"])
        file.flush()
        return _tool("nvdisasm", "-c", file.name)


def _compiled(launch: Launch, capability: int) -> tuple[dict[str, str], Any]:
    """The types of the arguments, and what Triton compiled or found in its cache."""
    signature, constexprs, attributes = specialize(launch, capability)
    source = ASTSource(launch.kernel, signature, constexprs, attributes)
    with compiling_for(target_of(capability)) as target:
        return signature, triton.compile(source, target=target, options=launch.options_for("cuda"))


class _NoDevice:
    """A driver of Triton that knows a target and nothing else: kernels may ask what they are compiled for."""

    def __init__(self, target: GPUTarget) -> None:
        self.get_current_target = lambda: target


@contextmanager
def compiling_for(target: GPUTarget) -> Iterator[GPUTarget]:
    """Until it ends, kernels that are compiled in this process find this target, whatever GPU there is."""
    before = driver._active
    driver.set_active(_NoDevice(target))
    try:
        yield target
    finally:
        driver._active = before


_FACTS = "facts.json"


@functools.cache
def _reader() -> str:
    """A digest of the code that determines facts: this module, and the cubin tools in the release of Triton."""
    return hashlib.sha256(Path(__file__).read_bytes() + triton.__version__.encode()).hexdigest()


def _from_json(text: str) -> Compiled:
    facts = json.loads(text)
    return Compiled(**facts | {"accesses": tuple(Access(**access) for access in facts["accesses"])})


_work: list[tuple[Launch, int]] = []  # launches and capabilities, inherited by forked processes


def compile_launches(work: Sequence[tuple[Launch, int]]) -> list[Compiled]:
    """The results of :func:`compile_launch` for all launches and capabilities, compiled on all cores.

    Launches that share a kernel are compiled once.

    Raises:
        RuntimeError: Triton runs its interpreter in this process (``TRITON_INTERPRET``).
        triton.CompilationError: a kernel does not compile.
    """
    keys = [
        (launch.kernel, str(specialize(launch, capability)), str(launch.options_for("cuda")), capability)
        for launch, capability in work
    ]
    unique = dict(zip(keys, work, strict=True))
    _work[:] = unique.values()
    try:
        with multiprocessing.get_context("fork").Pool() as pool:
            compiled = dict(zip(unique, pool.map(_compile, range(len(unique)), chunksize=1), strict=True))
    finally:
        _work.clear()
    return [compiled[key] for key in keys]


def _compile(index: int) -> Compiled:
    return compile_launch(*_work[index])


def assemble_for_amd(launch: Launch, architecture: str) -> str:
    """The assembly of ``launch`` for an architecture such as ``"gfx942"``, as text.

    Raises:
        RuntimeError, triton.CompilationError: as :func:`compile_launch`.
    """
    source = ASTSource(launch.kernel, *specialize(launch, architecture))
    with compiling_for(target_of(architecture)) as target:
        return triton.compile(source, target=target, options=launch.options_for("hip")).asm["amdgcn"]


def lower_launch(launch: Launch, architecture: int | str) -> str:
    """Triton's GPU IR of ``launch``, as text, for a compute capability or an architecture of AMD; nothing is cached.

    Raises:
        RuntimeError: Triton runs its interpreter in this process (``TRITON_INTERPRET``), or a pass fails.
        triton.CompilationError: the kernel's text does not compile.
    """
    # the stages of triton.compile up to "ttgir"
    source = ASTSource(launch.kernel, *specialize(launch, architecture))
    target = target_of(architecture)
    backend = make_backend(target)
    options = backend.parse_options(launch.options_for(target.backend) | source.parse_options())
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    to_ir = backend.get_codegen_implementation(options), backend.get_module_map()
    with compiling_for(target):
        module = source.make_ir(target, options, *to_ir, context)
    for stage in ("ttir", "ttgir"):
        module = stages[stage](module, {"target": target, **vars(options)})
    return str(module)


def specialize(launch: Launch, architecture: int | str) -> tuple[dict[str, str], dict[Any, Any], dict[Any, Any]]:
    """``(types, compile-time values, hints)`` of the launch's arguments; launches that agree in them share a kernel."""
    # the same steps as in JITFunction.run, without a device
    backend, bind = _binder(launch.kernel, architecture)
    options = launch.options_for(target_of(architecture).backend)
    bound, specialization, _ = bind(*launch.args, **launch.constexprs, **options)
    _, *specialized = launch.kernel._pack_args(backend, launch.constexprs | options, bound, specialization, None)
    signature, constexprs, attributes = specialized
    return signature, constexprs, attributes


@functools.cache
def _binder(kernel: Any, architecture: int | str) -> tuple[Any, Any]:
    if not isinstance(kernel, JITFunction):
        raise RuntimeError("ahead-of-time compilation needs a process without TRITON_INTERPRET")
    backend = make_backend(target_of(architecture))
    return backend, create_function_from_signature(kernel.signature, kernel.params, backend)


def target_of(architecture: int | str) -> GPUTarget:
    """Triton's target for a compute capability such as 90, or an architecture of AMD such as ``"gfx942"``."""
    if isinstance(architecture, int):
        return GPUTarget("cuda", architecture, 32)
    return GPUTarget("hip", architecture, 64 if architecture.startswith("gfx9") else 32)


def _read(launch: Launch, capability: int, signature: dict[str, str], compiled: Any) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        stack_nbytes = _resource(usage, "STACK")
        # only kernels with a stack access local memory, and disassembling takes long
        sass = _tool("nvdisasm", "-c", file.name) if stack_nbytes else ""
    return Compiled(
        kernel=launch.name,
        capability=capability,
        num_warps=launch.num_warps,
        registers=_resource(usage, "REG"),
        stack_nbytes=stack_nbytes,
        local_loads=len(re.findall(r"\bLDL\b", sass)),
        local_stores=len(re.findall(r"\bSTL\b", sass)),
        shared_nbytes=compiled.metadata.shared,
        instructions=_instructions(compiled.asm["cubin"]),
        tile_numel=_tile_numel(compiled.asm["ttir"]),
        accesses=_accesses(compiled.asm["ptx"], [name for name, kind in signature.items() if kind != "constexpr"]),
    )


def _instructions(cubin: bytes) -> int:
    """Number of machine instructions of a cubin, computed from the size of its text sections."""
    # an ELF file of 64 bits: e_shoff is at byte 40; e_shentsize, e_shnum and e_shstrndx are at byte 58
    (first,) = struct.unpack_from("<Q", cubin, 40)
    header_nbytes, count, names_index = struct.unpack_from("<HHH", cubin, 58)
    # section headers have sh_name and, after sh_type, sh_flags and sh_addr, sh_offset and sh_size
    sections = [struct.unpack_from("<I20xQQ", cubin, first + index * header_nbytes) for index in range(count)]
    names = sections[names_index][1]
    nbytes = sum(size for name, _, size in sections if cubin.startswith(b".text.", names + name))
    if not nbytes:
        raise RuntimeError("the cubin has no text section")
    return nbytes // INSTRUCTION_NBYTES


_POINTERS = re.compile(r"tensor<((?:\d+x)+)!tt\.ptr<")


def _tile_numel(ttir: str) -> int:
    """Number of elements of the largest tensor of pointers in Triton's IR.

    The IR is used because the names of compile-time arguments differ between kernels.
    """
    shapes = _POINTERS.findall(ttir)
    return max((math.prod(map(int, shape.rstrip("x").split("x"))) for shape in shapes), default=1)


_ACCESS = re.compile(r"\b(ld|st|atom|red)\.([\w.:]+)\s+(.*?);")
_KINDS = {"ld": "load", "st": "store", "atom": "atomic", "red": "atomic"}
_ADDRESS = re.compile(r"\[\s*(%\w+)")
# instructions that compute a register from others; values loaded from memory have no source, except parameters
_DEFINITION = re.compile(
    r"^\s*(?:@!?%\w+\s+)?(?!ld\.(?!param)|atom)[a-z][\w.:]*\s+(%\w+|\{[^}]*\})(?:\|%\w+)?\s*,(.*?);", re.MULTILINE
)
_REGISTER = re.compile(r"%rd?\d+")
_PARAMETER = re.compile(r"_param_\d+")


def _accesses(ptx: str, arguments: list[str]) -> tuple[Access, ...]:
    """All accesses to global memory in PTX, grouped; addresses are traced back to the kernel's pointers."""
    pointers = set(re.findall(r"\.ptr\b.*(_param_\d+)", ptx))
    sources: dict[str, set[str]] = {}  # register -> the registers and parameters that it is computed from
    for results, operands in _DEFINITION.findall(ptx):
        used = {*_REGISTER.findall(operands), *_PARAMETER.findall(operands)}
        for register in _REGISTER.findall(results):
            sources.setdefault(register, set()).update(used)

    @functools.cache
    def argument(register: str) -> str:
        seen, stack = {register}, [register]
        while stack:
            for source in sources.get(stack.pop(), ()):
                if source not in seen:
                    seen.add(source)
                    stack.append(source)
        numbers = [int(name.removeprefix("_param_")) for name in seen & pointers]
        return arguments[numbers[0]] if len(numbers) == 1 and numbers[0] < len(arguments) else "?"

    count: dict[tuple[str, str, int], int] = {}
    for operation, qualifiers, operands in _ACCESS.findall(ptx):
        *modifiers, kind = qualifiers.split(".")  # as in global.L1::evict_first.v4.b32
        if "global" in modifiers:
            vector = next((int(word[1:]) for word in modifiers if re.fullmatch(r"v\d", word)), 1)
            address = _ADDRESS.search(operands)
            name = argument(address.group(1)) if address else "?"
            key = name, _KINDS[operation], vector * int(kind.lstrip("bfsu")) // 8
            count[key] = count.get(key, 0) + 1
    return tuple(Access(*key, number) for key, number in sorted(count.items()))


def _resource(usage: str, name: str) -> int:
    found = re.search(rf"\b{name}:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump does not report {name}: {usage!r}")
    return int(found.group(1))


def _tool(name: str, *arguments: str) -> str:
    bundled = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    command = [str(bundled) if bundled.exists() else name, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
