"""Machine code of NVIDIA GPUs (SASS) as ``nvdisasm -c`` prints it: the path of full tiles, and the pipes it keeps busy.

A streaming multiprocessor (SM) has several pipes. Each takes instructions of some kinds, at a rate of its own. A kernel
runs at the speed of the memory only if none of its pipes needs longer for a tile than the memory for the tile's bytes.
``RATES`` has the rates of compute capability 9.0, from the table of arithmetic throughput in the CUDA programming
guide: a warp instruction takes a cycle of 32 lanes, half a cycle of 64 lanes, and so on. Latencies and bank conflicts
are not modelled: a kernel can be slower than its busiest pipe, never faster.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

ISSUE, ALU, FMA, XU, FP64 = "issue", "alu", "fma", "xu", "fp64"
LSU, SHARED, TENSOR = "lsu", "shared", "tensor"
PIPES = (ISSUE, ALU, FMA, XU, LSU, SHARED, TENSOR, FP64)

ISSUE_CYCLES = 1 / 4  # four schedulers, each with one warp instruction per cycle
SHARED_NBYTES = 128  # bytes per cycle from and to shared memory

_INTEGER = (
    "BMSK FCHK FMNMX FSEL FSET FSETP I2FP F2FP F2IP IABS IADD IADD3 IMNMX ISETP ISCADD LEA LOP LOP3 MOV P2R PLOP3 PRMT "
    "R2P SEL SGXT SHF SHL SHR VIADD VIADDMNMX VIMNMX VIMNMX3 VABSDIFF VOTE HMNMX2 HSETP2"
)
_SPECIAL = "BREV F2F F2I FLO FRND I2F MUFU POPC"
_MEMORY = "ATOM ATOMG LD LDC LDG LDGSTS LDL RED ST STG STL"
_SHARED = "ATOMS LDS LDSM SHFL STS STSM"

RATES: dict[str, tuple[str, float]] = {
    **dict.fromkeys(_INTEGER.split(), (ALU, 1 / 2)),  # comparisons and selections too
    **dict.fromkeys(["FADD", "FFMA", "FMUL", "FSWZADD", "HADD2", "HFMA2", "HMUL2"], (FMA, 1 / 4)),
    **dict.fromkeys(["IMAD", "IDP", "IMUL"], (FMA, 1 / 2)),  # one half of the pipe multiplies integers
    **dict.fromkeys(_SPECIAL.split(), (XU, 2.0)),
    **dict.fromkeys(["REDUX", "MATCH"], (XU, 2.0)),
    **dict.fromkeys(["DADD", "DFMA", "DMUL", "DSETP"], (FP64, 1 / 2)),
    **dict.fromkeys((*_MEMORY.split(), *_SHARED.split()), (LSU, 1.0)),
    **dict.fromkeys(["HMMA", "IMMA", "QMMA"], (TENSOR, 2.0)),
}
"""The pipe of an instruction and the cycles that a warp instruction keeps it busy, by the first part of its name. All
others, such as branches and the instructions of the uniform data path, only need to be issued."""


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        predicate: the condition under which it runs, such as ``"@!P0"``; empty if it always runs.
        name: with its modifiers, such as ``"LDG.E.128"``.
        operands: as printed.
    """

    predicate: str
    name: str
    operands: str

    @property
    def base(self) -> str:
        """The name without modifiers."""
        return self.name.partition(".")[0]

    @property
    def nbytes(self) -> int:
        """Bytes that an access to memory moves per thread."""
        widths = [part for part in self.name.split(".")[1:] if part in _WIDTHS]
        return _WIDTHS[widths[-1]] if widths else 4

    @property
    def is_wide(self) -> bool:
        """Whether it is an access of 16 bytes per thread to global memory."""
        return self.base in ("LDG", "STG", "LDGSTS") and self.nbytes == 16


_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
_LINE = re.compile(r"\s+/\*[0-9a-f]+\*/\s+(@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]*)\s*(.*?);")
_LABEL = re.compile(r"(\.L\w+):")
_TARGET = re.compile(r"\((\.L\w+)\)")
_ENDS = ("BRA", "EXIT", "RET", "BRX", "CALL")


@dataclass(frozen=True)
class Block:
    """Instructions of which only the last one may branch.

    Attributes:
        instructions: in order.
        successors: numbers of the blocks that may follow, with the target of a branch first.
    """

    instructions: tuple[Instruction, ...]
    successors: tuple[int, ...]


def blocks_of(sass: str) -> list[Block]:
    """The blocks of a kernel, in the order of its text."""
    runs: list[list[Instruction]] = [[]]
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            if runs[-1]:
                runs.append([])
            labels[label.group(1)] = len(runs) - 1
        elif found := _LINE.match(line):
            instruction = Instruction((found.group(1) or "").strip(), found.group(2), found.group(3))
            if instruction.base != "NOP":
                runs[-1].append(instruction)
            if instruction.base in _ENDS:
                runs.append([])
    return [Block(tuple(run), _successors(run, index, len(runs), labels)) for index, run in enumerate(runs)]


def _successors(run: list[Instruction], index: int, count: int, labels: dict[str, int]) -> tuple[int, ...]:
    last = run[-1] if run else Instruction("", "NOP", "")
    following = (index + 1,) if index + 1 < count else ()
    if last.base in ("EXIT", "RET"):
        return following if last.predicate else ()
    if last.base != "BRA" or ".DIV" in last.name:  # a called function returns, and threads of a warp do not diverge
        return following
    target = _TARGET.search(last.operands)
    to = (labels[target.group(1)],) if target and target.group(1) in labels else ()
    conditional = last.predicate or last.operands.split("`")[0].strip(" ,")  # as in "BRA P0, `(.L_x_1)"
    return to + following if conditional else to


@dataclass(frozen=True)
class WarpCourse:
    """The course of a warp through a kernel.

    Attributes:
        once: instructions outside of loops.
        repeated: instructions in loops whose body has accesses of 16 bytes per thread: the loops over tiles.
        searched: instructions in other loops that store nothing, such as those of a bisection.
        listed: instructions in other loops that store, such as those that list what was found.
        merged: instructions in the loops over sources, if the kernel merges several.
    """

    once: tuple[Instruction, ...]
    repeated: tuple[Instruction, ...]
    searched: tuple[Instruction, ...]
    listed: tuple[Instruction, ...]
    merged: tuple[Instruction, ...] = ()


def full_tile_path(sass: str, searches: int = 1, lists: int = 1, merges: bool = False) -> WarpCourse:
    """The path through a kernel with the most unconditional accesses of 16 bytes per thread.

    Only full tiles are accessed so; accesses under a condition count where nothing else differs. An access under the
    condition of the branch behind it is unconditional on the side where it holds, and is not made on the other. Among
    several such paths it is the one with the fewest instructions, if loops without such accesses run ``searches``
    times, or ``lists`` times if they store. The path has the body of a loop once, also if a loop is left out where
    there is nothing to do. If the kernel ``merges``, all loops that store no 16 bytes at a time are over sources, or
    inside of such a loop.
    """
    blocks = blocks_of(sass)
    loops = _loops_of(blocks)
    searching: set[int] = set()
    listing: set[int] = set()
    for body in loops.values():
        inner = [each for index in body for each in blocks[index].instructions]
        if not any(each.is_wide for each in inner):
            (listing if any(each.base == "STG" for each in inner) else searching).update(body)
    searching -= listing
    following = _without_shortcuts(blocks, loops)
    # wide accesses without a condition, all wide accesses, minus instructions; and the next block
    best: list[tuple[float, int, int, int]] = [(0, 0, 0, -1)] * len(blocks)
    for index in reversed(range(len(blocks))):
        run = blocks[index].instructions
        onward: list[tuple[float, int, int, int]] = []
        for each in following[index]:
            if each > index:
                wide = _wide_accesses(blocks[index], each)
                onward.append((best[each][0] + wide[0], best[each][1] + wide[1], best[each][2], each))
        ends = bool(run) and run[-1].base == "EXIT" and not run[-1].predicate
        at_end = (*_wide_accesses(blocks[index], -1), 0, -1) if ends else (float("-inf"), 0, 0, -1)
        full, possible, weight, behind = max(onward, default=at_end)
        times = searches if index in searching else lists if index in listing else 1
        best[index] = (full, possible, weight - len(run) * times, behind)
    chosen = [0]
    while best[chosen[-1]][3] > 0:
        chosen.append(best[chosen[-1]][3])
    streaming = [
        body
        for body in loops.values()
        if any(each.is_wide for index in body if index in chosen for each in blocks[index].instructions)
    ]
    merging = [body for body in loops.values() if merges and not _stores_tiles(blocks, body)]
    merged: set[int] = set().union(*merging)
    inside: set[int] = set().union(*streaming) - merged
    searched, listed = searching - inside - merged, listing - inside - merged

    def instructions_of(part: Iterable[int]) -> tuple[Instruction, ...]:
        return tuple(each for index in part for each in blocks[index].instructions)

    return WarpCourse(
        instructions_of(index for index in chosen if index not in inside | searched | listed | merged),
        instructions_of(index for index in chosen if index in inside),
        instructions_of(index for index in chosen if index in searched),
        instructions_of(index for index in chosen if index in listed),
        instructions_of(index for index in chosen if index in merged),
    )


def _stores_tiles(blocks: list[Block], body: set[int]) -> bool:
    """Whether a loop stores 16 bytes per thread at a time."""
    return any(each.is_wide and each.base == "STG" for index in body for each in blocks[index].instructions)


def _wide_accesses(block: Block, following: int) -> tuple[int, int]:
    """The number of a block's wide accesses that are unconditional, and of all that may be made, if block number
    ``following`` comes next."""
    *run, last = block.instructions or (Instruction("", "NOP", ""),)
    holds, fails = "", ""  # conditions that are known from the branch
    if last.base == "BRA" and last.predicate and len(set(block.successors)) == 2:
        holds, fails = last.predicate, _opposite(last.predicate)
        if following != block.successors[0]:
            holds, fails = fails, holds
    unconditional, possible = 0, 0
    for index, each in enumerate(block.instructions):
        if each.is_wide:
            known = not any(_writes(later, each.predicate) for later in run[index + 1 :])
            unconditional += not each.predicate or (known and each.predicate == holds)
            possible += not (each.predicate and known and each.predicate == fails)
    return unconditional, possible


def _opposite(predicate: str) -> str:
    return "@" + predicate[2:] if predicate.startswith("@!") else "@!" + predicate[1:]


def _writes(instruction: Instruction, predicate: str) -> bool:
    """Whether an instruction may change a condition, such as ``"@!P0"``: its first two operands may be predicates."""
    written = [each.strip() for each in instruction.operands.split(",")[:2]]
    return predicate.lstrip("@!") in written


def _loops_of(blocks: list[Block]) -> dict[int, set[int]]:
    """The blocks of every loop, by its first block in the text."""
    preceding: list[list[int]] = [[] for _ in blocks]
    for index, block in enumerate(blocks):
        for target in block.successors:
            preceding[target].append(index)
    following = [list(block.successors) for block in blocks]
    loops: dict[int, set[int]] = {}
    for index, block in enumerate(blocks):
        for target in block.successors:
            if target <= index and index in (behind := _reached(target, following, -1)):  # else it is out of line
                body = behind & _reached(index, preceding, target)
                loops[target] = loops.get(target, set()) | body
    return loops


def _without_shortcuts(blocks: list[Block], loops: dict[int, set[int]]) -> list[list[int]]:
    """The successors of every block, without those past a loop that begins behind the block."""
    following = [list(block.successors) for block in blocks]
    before: list[list[int]] | None = None
    while following != before:  # several conditions of one loop are removed one after the other, the last one first
        before = [list(each) for each in following]
        for header, body in loops.items():
            exits = {_end_of(each, following) for index in body for each in following[index] if each not in body}
            for index, onward in enumerate(following):
                if index not in body and any(_end_of(each, following, header) == header for each in onward):
                    following[index] = [each for each in onward if _end_of(each, following) not in exits]
    return following


def _end_of(index: int, following: list[list[int]], last: int = -1) -> int:
    """The block to which the blocks from ``index`` on lead without a branch, as far as ``last``."""
    while index != last and len(following[index]) == 1 and following[index][0] > index:
        index = following[index][0]
    return index


def _reached(start: int, edges: list[list[int]], last: int) -> set[int]:
    """The blocks that can be reached from a block, itself included, and from ``last`` no further."""
    found, ahead = {start}, [start]
    while ahead:
        index = ahead.pop()
        if index != last:
            ahead += [each for each in edges[index] if each not in found]
            found.update(edges[index])
    return found


def busy_cycles(instructions: Iterable[Instruction]) -> dict[str, float]:
    """The cycles that one warp's instructions keep each pipe of an SM busy."""
    cycles = dict.fromkeys(PIPES, 0.0)
    for each in instructions:
        cycles[ISSUE] += ISSUE_CYCLES
        if each.base in RATES:
            pipe, busy = RATES[each.base]
            cycles[pipe] += busy
        if each.base in _SHARED.split():
            cycles[SHARED] += 32 * each.nbytes / SHARED_NBYTES
    return cycles
