"""The average of a gradient over all ranks in two phases, with compression in both, step by step.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 -m examples.two_phases --compressor EFSignSGD

``gckernels.sync`` does this by default on three or more ranks (the program ``alltoall``); here it is for one gradient
and without overlap. Every rank owns one shard of the gradient. In the first phase the owner receives that shard from
all ranks and averages it; in the second phase all ranks receive the averaged shards. A rank sends about twice the size
of one payload, for any number of ranks.
"""

import argparse

import torch
import torch.distributed as dist

import gckernels


class TwoPhases:
    """Averages gradients of one shape over all ranks, with one residual for each of the two encodings."""

    def __init__(self, compressor: gckernels.Codec, numel: int) -> None:
        self.compressor = compressor
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        # Shards have equal sizes, except that the last ones may be shorter or empty.
        self.shard_numel = gckernels.chunk_numel(numel, self.world_size)
        self.owned_numel = max(0, min(self.shard_numel, numel - self.rank * self.shard_numel))
        # Error feedback: the part of the gradient, and of the owned shard, that has not been sent yet.
        self.residual = torch.zeros(numel)
        self.owned_residual = torch.zeros(self.owned_numel)

    def average(self, grad: torch.Tensor) -> torch.Tensor:
        """The mean of ``grad`` over all ranks, up to the content of the residuals; the same bits on every rank."""
        # 1. Encode: one payload for each shard.  [world_size, nbytes]
        payloads = gckernels.encode(self.compressor, grad, self.residual, chunks=self.world_size)

        # 2. All-to-all: payload i goes to rank i. The owner gets its shard from every rank.  [world_size, nbytes]
        received = torch.empty_like(payloads)
        dist.all_to_all_single(received, payloads)

        # 3. Decode all payloads of the shard, average them, and encode the average.  [nbytes]
        average = gckernels.decode(
            self.compressor, received, self.owned_numel, scale=1 / self.world_size, size=self.shard_numel
        )
        payload = gckernels.encode(self.compressor, average, self.owned_residual, size=self.shard_numel)

        # 4. All-gather: every rank gets the payloads of all shards.  [world_size, nbytes]
        gathered = torch.empty_like(payloads)
        dist.all_gather(list(gathered), payload)

        # 5. Decode. Owners decode their own payloads too, so that all ranks have the same bits.
        return gckernels.decode(self.compressor, gathered, grad.shape, chunks=self.world_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compressor", default="EFSignSGD", help="a compressor's spec, such as BlockQuant(bits=4)")
    parser.add_argument("--numel", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    compressor = gckernels.from_spec(args.compressor)
    assert isinstance(compressor, gckernels.Codec), "PowerSGD synchronises in other rounds"
    two_phases = TwoPhases(compressor, args.numel)

    grad = torch.randn(args.numel, generator=torch.Generator().manual_seed(dist.get_rank()))
    exact = grad.clone()
    dist.all_reduce(exact)
    exact /= dist.get_world_size()

    # The gradient is the same in every step, so the mean of all results approaches the exact mean.
    total = torch.zeros(args.numel)
    for step in range(1, args.steps + 1):
        total += two_phases.average(grad)
        if dist.get_rank() == 0 and step in (1, args.steps):
            error = (total / step - exact).norm() / exact.norm()
            print(f"step {step}: relative error of the mean of all steps {error:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
