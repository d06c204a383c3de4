"""Train a small GPT-2 with the Trainer of Transformers over a slow link, before and after one line is added.

    pip install 'gckernels[transformers]'
    python -m examples.finetune

Two ranks on this machine train the same model, which begins with random numbers, for the same steps on a link of 200
Mbit/s between network namespaces: first as it is, then with `callbacks=[Compression()]`. Nothing is downloaded.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from examples.bytes_lm import load_text
from examples.common import measured_with
from gckernels.sync import lab

CONTEXT, WIDTH, DEPTH, HEADS = 64, 128, 4, 4
ARMS = {"none": "Trainer", "auto": "Trainer with Compression()"}


class Windows(torch.utils.data.Dataset):
    """Windows of the source of Python's standard library, whose bytes are the words."""

    def __init__(self) -> None:
        self.text = load_text()[0].long()

    def __len__(self) -> int:
        return len(self.text) // CONTEXT

    def __getitem__(self, index: int) -> dict:
        window = self.text[index * CONTEXT : (index + 1) * CONTEXT]
        return {"input_ids": window, "labels": window}


def train(given: argparse.Namespace) -> None:
    """Train in one rank, and let rank 0 write what it took."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    from gckernels.sync.integrations.transformers import Compression  # <- gckernels 1/2

    ends_s = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_, **__) -> None:
            ends_s.append(time.perf_counter())

    callbacks = [Clock()]
    if given.arm != "none":
        callbacks.append(Compression() if given.arm == "auto" else Compression(given.arm))  # <- gckernels 2/2
    torch.manual_seed(0)
    sizes = {"n_positions": CONTEXT, "n_embd": WIDTH, "n_layer": DEPTH, "n_head": HEADS}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=0, eos_token_id=0, **sizes))
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            max_steps=given.steps,
            per_device_train_batch_size=4,
            learning_rate=1e-3,
            logging_steps=max(given.steps // 4, 1),
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            ddp_find_unused_parameters=False,  # all parameters are used
        )
        trainer = Trainer(model, args, train_dataset=Windows(), callbacks=callbacks)
        before = lab.sent_nbytes()
        trainer.train()
        sent_nbytes = (lab.sent_nbytes() - before) / given.steps
    if trainer.is_world_process_zero():
        steps_s = [end_s - start_s for start_s, end_s in itertools.pairwise(ends_s)]
        losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
        record = {
            "arm": given.arm,
            "elements": sum(each.numel() for each in model.parameters()),
            "step_s": statistics.median(steps_s[len(steps_s) // 2 :]),
            "sent_nbytes_per_step": sent_nbytes,
            "loss": losses[-1],
            "decisions": [] if len(callbacks) == 1 else [each.text for each in callbacks[1].attachment.decisions],
            **measured_with(model.device, "transformers"),
        }
        given.json.write_text(json.dumps(record))


def compare(given: argparse.Namespace) -> int:
    """Train all arms, one after the other, on links."""
    why = lab.enter_own_namespaces(["-m", "examples.finetune", *sys.argv[1:]]) or lab.missing()
    if why is not None:
        raise SystemExit(f"This example needs links between network namespaces: {why}")
    records = []
    with lab.links(lab.Network(2, given.rate)) as links, tempfile.TemporaryDirectory() as folder:
        for arm in ("none", given.plan):
            path = Path(folder, "record.json")
            options = ("--arm", arm, "--steps", str(given.steps), "--json", str(path))
            if any(links.run("-m", "examples.finetune", *options)):
                raise SystemExit(f"{arm} has failed, see above")
            records.append(json.loads(path.read_text()))
    plain = records[0]
    print(f"\nGPT-2 with {plain['elements']:,} parameters, 2 ranks, links of {given.rate}, {given.steps} steps\n")
    for record in records:
        named = ARMS.get(record["arm"], f"Trainer with Compression({record['arm']!r})")
        faster = plain["step_s"] / record["step_s"]
        print(
            f"{named}: {1e3 * record['step_s']:.0f} ms per step ({faster:.1f} times as fast), "
            f"{record['sent_nbytes_per_step']:,.0f} bytes sent per step in the mean, loss {record['loss']:.3f}"
        )
        print(*record["decisions"], sep="\n")
    if given.json is not None:
        given.json.write_text(json.dumps(records, indent=2) + "\n")
    return 0


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter  # keeps the line breaks
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--rate", type=lab.checked_rate, default="200mbit", help="of the links")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--plan", default="auto", help="a compressor in place of a plan that is found")
    parser.add_argument("--arm", help=argparse.SUPPRESS)  # in ranks
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all records here")
    given = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if lab.in_rank():
        train(given)
        return 0
    return compare(given)


if __name__ == "__main__":
    sys.exit(main())
