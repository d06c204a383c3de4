"""Kernel launches can be run, recorded and compiled ahead of time."""

from __future__ import annotations

import struct

import pytest
import torch
import triton
import triton.language as tl

from gckernels.toolkit.kernels.launch import launch, record_launches
from harness.machine_code.aot import _accesses, _instructions, _tile_numel, compile_launch
from helpers import KERNEL, KERNEL_PARAM


@triton.jit
def _fill_kernel(out_ptr, value, COUNT: tl.constexpr):
    offsets = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    tl.store(out_ptr + offsets, tl.zeros((COUNT,), tl.float32) + value)


@pytest.mark.parametrize("implementation", [KERNEL_PARAM])
def test_launch_runs(implementation):
    out = torch.zeros(48, device=implementation.device)
    launch(_fill_kernel, (2,), out, 3.0, COUNT=16)
    assert out.tolist() == [3.0] * 32 + [0.0] * 16


def test_empty_grid_runs_nothing():
    launch(_fill_kernel, (0,), None, 3.0, COUNT=16)
    with record_launches() as recorded:
        launch(_fill_kernel, (4, 0), None, 3.0, COUNT=16)
    assert recorded == []


def test_recording_runs_nothing_and_ends():
    out = torch.zeros(16)
    with record_launches() as outer:
        launch(_fill_kernel, (1,), out, 1.0, num_warps=8, COUNT=16)
        with record_launches() as inner:
            launch(_fill_kernel, (1,), out, 2.0, COUNT=16)
        launch(_fill_kernel, (1,), out, 3.0, COUNT=16)
    assert [recorded.args[1] for recorded in outer] == [1.0, 3.0]
    assert [recorded.args[1] for recorded in inner] == [2.0]
    assert outer[0].num_warps == 8
    assert outer[0].constexprs == {"COUNT": 16}
    assert not out.any()


def test_recording_ends_when_it_fails():
    with pytest.raises(KeyError), record_launches():
        raise KeyError
    with record_launches() as recorded:
        pass
    assert recorded == []


@pytest.mark.skipif(KERNEL.device == "cuda", reason="only an interpreted kernel cannot be compiled")
def test_interpreted_kernels_cannot_be_compiled():
    with record_launches() as recorded:
        launch(_fill_kernel, (1,), torch.zeros(16), 1.0, COUNT=16)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"):
        compile_launch(recorded[0], 90)


PTX = """
.visible .entry _kernel(
    .param .u64 .ptr .global .align 1 _kernel_param_0,
    .param .u64 .ptr .global .align 1 _kernel_param_1,
    .param .u32 _kernel_param_2
)
    ld.param.b64    %rd1, [_kernel_param_0];
    ld.param.b64    %rd2, [_kernel_param_1];
    ld.param.b32    %r1, [_kernel_param_2];
    mul.wide.s32    %rd3, %r1, 4;
    add.s64     %rd4, %rd1, %rd3;
    @%p1 ld.global.v4.b32 { %r2, %r3, %r4, %r5 }, [ %rd4 + 0 ];
    ld.global.L1::evict_first.b16 { %rs1 }, [ %rd4 + 32 ];
    add.s64     %rd5, %rd2, %rd3;
    mov.b64     {%r6, %r7}, %rd5;
    shfl.sync.idx.b32   %r8|%p2, %r6, %r1, 31, -1;
    mov.b64     %rd6, {%r8, %r7};
    st.global.v2.b64 [ %rd6 + 0 ], { %rd7, %rd8 };
    mul.wide.s32    %rd9, %r2, 4;
    add.s64     %rd10, %rd2, %rd9;
    atom.global.gpu.relaxed.add.f32 %r9, [ %rd10 + 0 ], %r3;
    selp.b64    %rd11, %rd4, %rd10, %p1;
    st.global.b8 [ %rd11 + 0 ], { %rs1 };
    st.shared.b32 [ %r1 + 0 ], %r2;
"""


def test_accesses_are_traced_to_their_arguments():
    """Tracing follows arithmetic, halves of an address and shuffles, but stops at a loaded index."""
    found = {(access.argument, access.kind, access.nbytes, access.count) for access in _accesses(PTX, ["a", "b", "n"])}
    assert found == {
        ("a", "load", 16, 1),
        ("a", "load", 2, 1),
        ("b", "store", 16, 1),
        ("b", "atomic", 4, 1),
        ("?", "store", 1, 1),
    }


def test_instructions_are_the_text_of_a_cubin():
    """The number of instructions covers all functions of the cubin and nothing else."""
    names = b"\0.text.one\0.text.two\0.nv.info\0.shstrtab\0"
    sizes = {b".text.one": 640, b".text.two": 256, b".nv.info": 128, b".shstrtab": len(names)}
    cubin = bytearray(64) + names
    headers = len(cubin)
    for name, size in sizes.items():
        cubin += struct.pack("<IIQQQQ", names.index(name), 1, 0, 0, 64, size).ljust(64, b"\0")
    struct.pack_into("<Q", cubin, 40, headers)
    struct.pack_into("<HHH", cubin, 58, 64, len(sizes), len(sizes) - 1)
    assert _instructions(bytes(cubin)) == (640 + 256) // 16


TTIR = """
tt.func public @_kernel(%grad_ptr: !tt.ptr<f32> {tt.divisibility = 16 : i32}, %scale: f32) {
    %0 = tt.addptr %grad_ptr, %first : !tt.ptr<f32>, i64
    %1 = tt.addptr %splat, %offsets : tensor<16x128x!tt.ptr<f32>>, tensor<16x128xi32>
    %2 = tt.load %1 : tensor<16x128x!tt.ptr<f32>>
    %3 = tt.load %stats : tensor<16x!tt.ptr<f32>>
    %4 = tt.expand_dims %3 {axis = 1 : i32} : tensor<4096xf32> -> tensor<4096x1xf32>
"""


def test_tile_is_the_largest_access():
    assert _tile_numel(TTIR) == 16 * 128
    assert _tile_numel("tt.load %0 : !tt.ptr<f32>") == 1
