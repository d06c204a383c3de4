"""The path of full tiles through machine code, and the cycles of its pipes, counted by hand."""

from __future__ import annotations

import pytest

from harness.machine_code.aot import Compiled
from harness.machine_code.pipes import NBYTES_PER_CYCLE, above_the_bar, busier, estimate, markdown
from harness.machine_code.sass import (
    ALU,
    FMA,
    ISSUE,
    LSU,
    PIPES,
    SHARED,
    TENSOR,
    XU,
    blocks_of,
    busy_cycles,
    full_tile_path,
)


def code(*lines: str) -> str:
    """Machine code as ``nvdisasm`` prints it; a line that begins with a dot is a label."""
    return "\n".join(
        f"{line}:" if line.startswith(".") else f"        /*{16 * number:04x}*/                   {line} ;"
        for number, line in enumerate(lines)
    )


# a full tile is loaded and stored at once, a partial one under masks; both paths meet
BRANCHES = code(
    "ISETP.GE.AND P0, PT, R0, UR4, PT",
    "@!P0 BRA `(.L_x_1)",
    "@P1 LDG.E R4, desc[UR4][R2.64]",
    "@P2 LDG.E.U8 R5, desc[UR4][R2.64+0x4]",
    "BRA `(.L_x_2)",
    ".L_x_1",
    "LDG.E.128 R4, desc[UR4][R2.64]",
    "FMUL R4, R4, R8",
    ".L_x_2",
    "STG.E.128 desc[UR4][R6.64], R4",
    "EXIT",
    ".L_x_3",
    "BRA `(.L_x_3)",
    "NOP",
)


def names(instructions) -> list[str]:
    return [each.name for each in instructions]


def test_the_path_is_that_of_full_tiles():
    path = full_tile_path(BRANCHES)
    assert names(path.once) == ["ISETP.GE.AND", "BRA", "LDG.E.128", "FMUL", "STG.E.128", "EXIT"]
    assert path.repeated == path.searched == ()


@pytest.mark.parametrize(
    ("between", "partial"), [("NOP", False), ("FADD R1, R1, R2", False), ("ISETP.GT.AND P2, PT, R1, R2, PT", True)]
)
def test_an_access_under_the_condition_of_the_branch_behind_it(between, partial):
    """The loads of a full tile stand before the branch past those of a partial one."""
    hoisted = code(
        "@P2 LDG.E.128 R4, desc[UR4][R2.64]",
        between,
        "@P2 BRA `(.L_x_1)",
        "@!P0 LDG.E.128 R4, desc[UR4][R2.64]",
        "FSEL R4, R4, RZ, !P0",
        ".L_x_1",
        "STG.E.128 desc[UR4][R6.64], R4",
        "EXIT",
    )
    path = names(full_tile_path(hoisted).once)
    assert ("FSEL" in path) is partial
    assert path[-2:] == ["STG.E.128", "EXIT"]


def test_blocks_end_at_branches_and_begin_at_labels():
    found = blocks_of(BRANCHES)
    assert [len(block.instructions) for block in found[:5]] == [2, 3, 2, 2, 1]
    assert [block.successors for block in found[:5]] == [(2, 1), (3,), (3,), (), (4,)]


def test_of_two_paths_with_the_same_accesses_the_shorter_one_counts():
    """A slow branch, such as the branch of a division whose operands are denormal, is left out."""
    slow = code(
        "LDG.E.128 R4, desc[UR4][R2.64]", "@P0 BRA `(.L_x_1)", "CALL.REL.NOINC `(_slow)", "FADD R0, R0, R0", ".L_x_1",
        "MUFU.RCP R0, R0", "EXIT",
    )  # fmt: skip
    assert names(full_tile_path(slow).once) == ["LDG.E.128", "BRA", "MUFU.RCP", "EXIT"]


def test_loops_over_tiles_are_told_from_others():
    looping = code(
        "MOV R0, RZ",
        ".L_x_1",
        "LDG.E.128 R4, desc[UR4][R2.64]",
        "FADD R0, R0, R4",
        "@P0 BRA `(.L_x_1)",
        ".L_x_2",
        "SHFL.BFLY PT, R1, R0, 0x1, 0x1f",
        "@!P0 BRA `(.L_x_2)",
        "STG.E desc[UR4][R6.64], R0",
        "EXIT",
    )
    path = full_tile_path(looping)
    assert names(path.repeated) == ["LDG.E.128", "FADD", "BRA"]
    assert names(path.searched) == ["SHFL.BFLY", "BRA"]
    assert names(path.once) == ["MOV", "STG.E", "EXIT"]


def test_loops_that_store_are_told_from_others():
    listing = code(
        "LDG.E.128 R4, desc[UR4][R2.64]",
        ".L_x_1",
        "FSET.BF.GE.AND R0, R4, R1, PT",
        "@P0 BRA `(.L_x_1)",
        ".L_x_2",
        "STG.E.U16 desc[UR4][R6.64], R0",
        "@!P0 BRA `(.L_x_2)",
        "EXIT",
    )
    path = full_tile_path(listing, searches=9, lists=2)
    assert names(path.searched) == ["FSET.BF.GE.AND", "BRA"]
    assert names(path.listed) == ["STG.E.U16", "BRA"]
    assert names(path.once) == ["LDG.E.128", "EXIT"]
    pipes = estimate(path, compiled(128, 1), nbytes=4096, programs=8, numel=1024, searches=9, lists=2)
    assert pipes.cycles[ISSUE] == (2 + 9 * 2 + 2 * 2) / 4 * 8 / 1024


def test_loops_over_sources_are_inside_of_loops_over_tiles():
    """The decoder of a sparsifier has three loops in each other: over tiles, sources and entries."""
    merging = code(
        "MOV R0, RZ",
        ".L_x_1",
        "STG.E.128 desc[UR4][R2.64], RZ",
        ".L_x_2",
        "LDG.E R1, desc[UR4][R8.64]",
        ".L_x_3",
        "STG.E desc[UR4][R6.64], R1",
        "@P0 BRA `(.L_x_3)",
        "@P1 BRA `(.L_x_2)",
        "STG.E.128 desc[UR4][R4.64], R8",
        "@P2 BRA `(.L_x_1)",
        "EXIT",
    )
    path = full_tile_path(merging, merges=True)
    assert names(path.merged) == ["LDG.E", "STG.E", "BRA", "BRA"]
    assert names(path.repeated) == ["STG.E.128", "STG.E.128", "BRA"]
    assert names(path.once) == ["MOV", "EXIT"]
    pipes = estimate(path, compiled(128, 1), nbytes=4096, programs=2, numel=1024, sources=8)
    assert pipes.cycles[ISSUE] == (2 + 4 * (3 + 8 * 4)) / 4 * 2 / 1024
    assert not full_tile_path(merging).merged


def test_a_warp_does_not_diverge():
    """The code for threads that have diverged is behind the kernel, and goes back to where it came from."""
    diverging = code(
        "LDG.E.128 R4, desc[UR4][R2.64]",
        ".L_x_1",
        "FADD R0, R0, R4",
        "BRA.DIV UR4, `(.L_x_3)",
        "SHFL.BFLY PT, R1, R0, 0x1, 0x1f",
        ".L_x_2",
        "@P0 BRA `(.L_x_1)",
        "STG.E.128 desc[UR4][R2.64], R4",
        "EXIT",
        ".L_x_3",
        "WARPSYNC.COLLECTIVE R3, `(.L_x_4)",
        "BRA `(.L_x_2)",
        ".L_x_4",
        "BRA `(.L_x_4)",
    )
    path = full_tile_path(diverging)
    assert names(path.once) == ["LDG.E.128", "STG.E.128", "EXIT"]
    assert names(path.searched) == ["FADD", "BRA.DIV", "SHFL.BFLY", "BRA"]


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("FFMA R0, R1, R2, R3", {FMA: 0.25}),
        ("IMAD.WIDE.U32 R0, R1, R2, RZ", {FMA: 0.5}),
        ("LOP3.LUT R0, R1, R2, R3, 0x96, !PT", {ALU: 0.5}),
        ("@P0 FSEL R0, R1, R2, P1", {ALU: 0.5}),
        ("MUFU.RCP R0, R1", {XU: 2.0}),
        ("POPC R0, R1", {XU: 2.0}),
        ("I2F.U16 R0, R1", {XU: 2.0}),
        ("I2FP.F32.S32 R0, R1", {ALU: 0.5}),
        ("LDG.E.128 R0, desc[UR4][R2.64]", {LSU: 1.0}),
        ("LDS.128 R0, [R2]", {LSU: 1.0, SHARED: 4.0}),
        ("LDS.U16 R0, [R2]", {LSU: 1.0, SHARED: 0.5}),
        ("STS R0, [R2]", {LSU: 1.0, SHARED: 1.0}),
        ("SHFL.BFLY PT, R1, R0, 0x1, 0x1f", {LSU: 1.0, SHARED: 1.0}),
        ("HMMA.16816.F32.BF16 R0, R4, R8, R0", {TENSOR: 2.0}),
        ("UIADD3 UR4, UR5, 0x1, URZ", {}),
        ("BAR.SYNC.DEFER_BLOCKING 0x0", {}),
    ],
)
def test_cycles_of_one_instruction(instruction, expected):
    (block,) = blocks_of(code(instruction))
    assert busy_cycles(block.instructions) == dict.fromkeys(PIPES, 0.0) | {ISSUE: 0.25} | expected


def compiled(tile_numel: int, num_warps: int) -> Compiled:
    return Compiled("_kernel", 90, num_warps, 32, 0, 0, 0, 0, 16, tile_numel, ())


def test_estimate_of_a_kernel_with_one_tile_per_program():
    """Six instructions per warp, of which one on each of ALU and FMA and two on the LSU. A warp has 32 elements."""
    pipes = estimate(full_tile_path(BRANCHES), compiled(128, 4), nbytes=8 * 1024, programs=8, numel=1024)
    assert (pipes.nbytes, pipes.memory) == (8.0, 8 / NBYTES_PER_CYCLE)
    expected = {ISSUE: 6 / 4, ALU: 1 / 2, FMA: 1 / 4, LSU: 2}
    assert pipes.cycles == dict.fromkeys(PIPES, 0.0) | {pipe: cycles / 32 for pipe, cycles in expected.items()}
    assert pipes.busiest == LSU
    assert pipes.ratio == pytest.approx(2 / 32 * NBYTES_PER_CYCLE / 8)
    assert pipes.streams


def test_estimate_of_a_kernel_with_several_tiles_per_program():
    """The three instructions of the loop run four times in each program."""
    looping = code("MOV R0, RZ", ".L_x_1", "LDG.E.128 R4, [R2.64]", "FADD R0, R0, R4", "@P0 BRA `(.L_x_1)", "EXIT")
    pipes = estimate(full_tile_path(looping), compiled(128, 1), nbytes=4096, programs=2, numel=1024)
    assert pipes.cycles[ISSUE] == (2 + 4 * 3) / 4 * 2 / 1024
    assert pipes.cycles[LSU] == 4 * 2 / 1024


def test_estimate_of_a_kernel_that_searches():
    looping = code("LDG.E.128 R4, [R2.64]", ".L_x_1", "FADD R0, R0, R4", "@P0 BRA `(.L_x_1)", "EXIT")
    pipes = estimate(full_tile_path(looping), compiled(128, 1), nbytes=4096, programs=8, numel=1024, searches=5)
    assert pipes.cycles[ISSUE] == (2 + 5 * 2) / 4 * 8 / 1024


ROW = {"configuration": "TopK", "call": "encode", "gradient": "fp32", "kernel": "_a_kernel", "busiest": "xu"}


def test_the_report_names_kernels_above_the_bar_and_busier_ones():
    rows = [ROW | {"ratio": "0.80"}, ROW | {"kernel": "_b_kernel", "ratio": "1.20"}]
    rows += [ROW | {"kernel": "_c_kernel", "ratio": "12.00"}, ROW | {"kernel": "_d_kernel", "ratio": ""}]
    assert above_the_bar(rows) == [
        "TopK, encode, fp32, _c_kernel: xu 12.00",
        "TopK, encode, fp32, _b_kernel: xu 1.20",
    ]
    assert busier(rows, rows) == []
    assert busier(rows, [ROW | {"ratio": "0.79"}]) == []
    assert busier(rows, [ROW | {"ratio": "0.81"}]) == ["TopK, encode, fp32, _a_kernel: xu 0.80 -> 0.81"]
    assert busier(rows[:1], rows[1:2]) == ["TopK, encode, fp32, _b_kernel: not in the table"]
    header, _, line = markdown(rows).splitlines()
    assert header.count("|") == line.count("|")
    assert line.startswith("| `TopK` | **12.00 xu** |")
    assert all(text in header for text in ("encode with feedback, bf16", "decode, fp32"))
