"""The callback of Transformers: trainings resume with the same bits, logs have figures, checkpoints are whole."""

from __future__ import annotations

import dataclasses
import gc
import os
import shutil
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", reason="needs the extra 'transformers'")

from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import tunings
from gckernels import sync
from gckernels.sync.integrations.transformers import Compression
from ranks import run_ranks, values_of
from trainers import SAVED, STEPS, as_launched, digest, shard_on_cpu
from tunings import PLAIN
from workloads import digest_of

pytestmark = pytest.mark.host_only("trainers choose the device themselves")
VOCABULARY = 97


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        noise = torch.randint(0, 3, (32,), generator=torch.Generator().manual_seed(index))
        ids = (torch.arange(32) * (index % 7 + 1) + noise) % VOCABULARY
        return {"input_ids": ids, "labels": ids}


class Arguments(TrainingArguments):
    @property
    def device(self):
        """The device without its number, with which releases before 5.18 cannot load an optimizer on a CPU."""
        return torch.device(super().device.type)


def trainer_of(folder, callback, kind=Trainer, eval_dataset=None, **arguments):
    as_launched()
    AcceleratorState._reset_state(True)
    torch.manual_seed(0)
    sizes = {"n_positions": 32, "n_embd": 48, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes))
    given = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "save_steps": SAVED,
        "logging_steps": SAVED,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "ddp_backend": "gloo",
    }
    callbacks = [] if callback is None else [callback]
    sets = {"train_dataset": Texts(), "eval_dataset": eval_dataset}
    trainer = kind(model=model, args=Arguments(**given | arguments), callbacks=callbacks, **sets)
    if "fsdp" in arguments:
        shard_on_cpu(FullyShardedDataParallelPlugin(**trainer.args.fsdp_plugin_args))
        trainer.is_fsdp_enabled = True
    return trainer


def trained(folder, callback, resumed=None, **arguments):
    """The digest of a trained model, and its trainer."""
    trainer = trainer_of(folder, callback, **arguments)
    trainer.train(resume_from_checkpoint=resumed)
    found = digest(trainer.model.parameters())
    if callback is not None and callback.attachment is not None:
        callback.attachment.close()
    dist.barrier()
    return found, trainer


def resumed(folder, plan, arguments):
    """The digests of a training, of one that resumes it, of one that resumes it without a state, and its steps."""
    at = f"{folder}/checkpoint-{SAVED}"
    whole, _ = trained(folder, Compression(plan), **arguments)
    callback = Compression(plan)
    again, _ = trained(folder, callback, at, **arguments)
    steps = callback.attachment.steps
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(f"{at}/gckernels")
    dist.barrier()
    without, _ = trained(folder, Compression(plan, allow_missing=True), at, **arguments)
    gc.collect()
    return whole, again, without, steps


@pytest.mark.parametrize(
    ("plan", "arguments"),
    [
        ("BlockQuant(bits=4)", {}),
        ("BlockQuant(bits=4)", {"gradient_accumulation_steps": 2, "bf16": True, "max_grad_norm": 0.1}),
        ("PowerSGD(rank=2)", {"ddp_find_unused_parameters": False}),
        ("EFSignSGD", {"torch_compile": True, "torch_compile_backend": "aot_eager"}),
        ("BlockQuant(bits=4)", {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 2}}),
    ],
)
def test_a_training_resumes_with_the_same_bits(plan, arguments, tmp_path):
    found = values_of(run_ranks(2, resumed, str(tmp_path), plan, arguments, timeout_s=280))
    assert found[0] == found[1]
    whole, again, without, steps = found[0]
    assert whole == again and steps == STEPS
    assert without != whole, "the state makes a difference"


class Scripted(Compression):
    """Finds its plan by the times that a test says."""

    def __init__(self, model, step_s):
        super().__init__()
        self.handles = []
        self.times = tunings.scripted(
            model, {"four": "BlockQuant(bits=4)", "eight": "BlockQuant"}, step_s, self.handles
        )

    def on_train_begin(self, *arguments, **named):
        self.times.__enter__()
        super().on_train_begin(*arguments, **named)
        self.handles.append(self.attachment)

    def on_train_end(self, *arguments, **named):
        super().on_train_end(*arguments, **named)
        self.times.__exit__(None, None, None)


def tuned(folder, arguments, saved_at):
    """The digests, plans and steps of a training that finds its plan, and of one that resumes it. The residuals that
    one has saved, and the other has loaded, follow, and the last decision."""
    found, unsent = [], []
    steps = saved_at + 6
    for at in (None, f"{folder}/checkpoint-{saved_at}"):
        trainer = trainer_of(folder, None, max_steps=steps, save_steps=saved_at, **arguments)
        callback = Scripted(trainer.model, {PLAIN: 1.0, "four": 0.5, "eight": 0.7})
        trainer.add_callback(callback)
        trainer.add_callback(Residuals(callback, unsent, saved_at))
        trainer.train(resume_from_checkpoint=at)
        attachment = callback.attachment
        found.append((digest(trainer.model.parameters()), attachment.plan.fingerprint(), attachment.steps))
        attachment.close()
    return found, unsent, attachment.decisions[-1].text


class Residuals(TrainerCallback):
    """Notes digests of the residuals at a step."""

    def __init__(self, callback, found, step):
        self.callback, self.found, self.step = callback, found, step

    def note(self, state):
        if state.global_step == self.step:
            feedback = self.callback.attachment.state_dict()["feedback"]["worker"]
            self.found.append(digest_of(feedback[name] for name in sorted(feedback)))

    def on_train_begin(self, args, state, control, **_):
        self.note(state)

    def on_save(self, args, state, control, **_):
        self.note(state)


ACCUMULATED = {"gradient_accumulation_steps": 2, "bf16": True}


@pytest.mark.parametrize("arguments", [{}, ACCUMULATED], ids=["plain", "accumulated"])
def test_a_plan_that_was_found_is_resumed_with_the_same_bits(arguments, tmp_path):
    found = values_of(run_ranks(2, tuned, str(tmp_path), arguments, 72))
    for (whole, again), unsent, last in found:
        assert again == whole and whole[2] == 78
        assert unsent[0] == unsent[1]
        assert "resumed at step 72 with the saved plan" in last
    assert found[0][0] == found[1][0]


def test_trials_that_were_not_over_begin_anew_with_what_was_not_sent(tmp_path):
    """The first step of the resumed training sends it exactly."""
    for (_, again), unsent, last in values_of(run_ranks(2, tuned, str(tmp_path), ACCUMULATED, 24)):
        assert unsent[0] == unsent[1] and again[2] == 30
        assert "it is tuned anew: its trials had not ended" in last


def resumed_elsewhere(folder):
    """The errors of a training that is resumed without a state, and with the state of another checkpoint."""
    plan, at = "BlockQuant(bits=4)", f"{folder}/checkpoint-{SAVED}"
    texts = []
    trained(folder, Compression(plan))
    trained(f"{folder}/other", Compression(plan), learning_rate=1e-2)
    for callback in (Compression(plan), Compression(plan, resume_from=f"{folder}/other/checkpoint-{SAVED}")):
        with pytest.raises((FileNotFoundError, ValueError)) as caught:
            trained(f"{folder}/empty", callback, at)
        callback.attachment.close()
        texts.append(str(caught.value))
    moved, _ = trained(f"{folder}/empty", Compression(plan, resume_from=at), at)
    expected, _ = trained(folder, Compression(plan), at)
    return texts, moved, expected


def test_a_state_is_that_of_the_checkpoint(tmp_path):
    for (missing, other), moved, expected in values_of(run_ranks(2, resumed_elsewhere, str(tmp_path))):
        assert "empty/checkpoint-4/gckernels has no whole state" in missing and "allow_missing=True" in missing
        assert "has the state of another checkpoint: step 4" in other
        assert moved == expected


class Logged(TrainerCallback):
    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **_):
        self.logs.append(dict(logs))


def logged(folder):
    callback, before = Compression("EFSignSGD"), Logged()
    trainer = trainer_of(folder, before, save_total_limit=1)
    trainer.add_callback(callback)
    trainer.train()
    numbers = [each for each in callback.attachment.stats().items() if not isinstance(each[1], str)]
    callback.attachment.close()
    return before.logs, trainer.state.log_history, numbers


def test_figures_are_logged_where_the_trainer_logs(tmp_path):
    for logs, history, numbers in values_of(run_ranks(2, logged, str(tmp_path))):
        names = {f"gckernels/{name}" for name, _ in numbers}
        assert names <= logs[-2].keys() and names <= history[-2].keys() and logs[-2]["gckernels/step"] == STEPS
        assert "loss" not in logs[-1] and not names & logs[-1].keys()
    assert [each.name for each in tmp_path.glob("checkpoint-*")] == [f"checkpoint-{STEPS}"]


def of_another_size(folder, at):
    callback = Compression("BlockQuant(bits=4)")
    found, _ = trained(folder, callback, at)
    return found, callback.attachment.steps


def test_another_number_of_ranks_resumes(tmp_path):
    values_of(run_ranks(2, of_another_size, str(tmp_path), None))
    found = values_of(run_ranks(3, of_another_size, str(tmp_path), f"{tmp_path}/checkpoint-{SAVED}"))
    assert len({*found}) == 1 and found[0][1] == STEPS


def twice(folder, how):
    callback = Compression(how)
    trainer = trainer_of(folder, callback, save_strategy="no")
    found = []
    for _ in range(2):
        trainer.train()
        found.append((callback.attachment.steps, digest(trainer.model.parameters())))
    return found


@pytest.mark.parametrize(
    ("how", "steps"), [("BlockQuant(bits=4)", STEPS), (sync.Updates(every=3, plan="BlockQuant"), 3)]
)
def test_a_trainer_trains_twice(how, steps, tmp_path):
    found = values_of(run_ranks(2, twice, str(tmp_path), how))
    assert found[0] == found[1] and [each for each, _ in found[0]] == [steps, steps]


class Interrupting(TrainerCallback):
    """Raises in the third step."""

    def on_step_end(self, args, state, control, **_):
        if state.global_step == 3:
            raise KeyboardInterrupt


def shared(folder, uses_one_callback, keeps):
    """Train with several trainers, one after the other, which share a callback or a model; rank 0 alone keeps its
    trainers with ``keeps``."""
    found, kept, model = [], [], None
    callback = Compression("BlockQuant(bits=4)")
    for number in range(3):
        if not uses_one_callback:
            callback = Compression("BlockQuant(bits=4)")
        trainer = trainer_of(f"{folder}/{number}", callback, save_strategy="no")
        if uses_one_callback:
            trainer.train()
        else:
            model = trainer.model if model is None else model
            trainer.model = trainer.model_wrapped = model
            if number == 1:
                trainer.add_callback(Interrupting())
                with pytest.raises(KeyboardInterrupt):
                    trainer.train()
            else:
                trainer.train()
        if not keeps or dist.get_rank() == 0:
            kept.append(trainer)
        figures = callback.attachment.stats()
        found.append((trainer.state.global_step, callback.attachment.steps, figures["step"]))
        assert figures["sent_nbytes"] < figures["plain_nbytes"]
        callback.attachment.report(f"{folder}/{number}.{dist.get_rank()}.html")
    for handle in (each.callback_handler.callbacks for each in kept):
        for each in handle:
            if isinstance(each, Compression):
                each.attachment.close()
    return found


@pytest.mark.parametrize("keeps", [False, True])
def test_one_callback_serves_several_trainers(keeps, tmp_path):
    found = values_of(run_ranks(2, shared, str(tmp_path), True, keeps, timeout_s=280))
    assert found == [[(STEPS, STEPS, STEPS)] * 3] * 2


def test_other_trainers_go_on_with_a_model(tmp_path):
    found = values_of(run_ranks(2, shared, str(tmp_path), False, False, timeout_s=280))
    assert found == [[(STEPS, STEPS, STEPS), (3, 3, 3), (STEPS, STEPS, STEPS)]] * 2


def without_ranks(folder):
    dist.destroy_process_group()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    callback = Compression("BlockQuant(bits=4)")
    with mock.patch(f"{__name__}.as_launched"):
        trainer_of(folder, callback, save_strategy="no", ddp_backend=None).train()
    return callback.attachment


def test_a_process_alone_trains_as_without_it(tmp_path):
    assert values_of(run_ranks(1, without_ranks, str(tmp_path), fresh=True)) == [None]


# -------------------------------------------------------------------- averaged updates


def updates(every, **settings):
    return sync.Updates(plan="EFSignSGD", every=every, **settings)


class Recording(Trainer):
    """Keeps the batches of its losses, and the models that it evaluates and saves."""

    batches = None

    def compute_loss(self, model, inputs, *arguments, **named):
        if model.training and self.batches is not None:
            self.batches.append(({name: each.clone() for name, each in inputs.items()}, arguments, named))
        return super().compute_loss(model, inputs, *arguments, **named)

    def prediction_step(self, model, *arguments, **named):
        self.seen.append(digest(model.parameters()))
        return super().prediction_step(model, *arguments, **named)

    def _save(self, *arguments, **named):
        self.saved.append(digest(self.model.parameters()))
        super()._save(*arguments, **named)


def recording(folder, callback, **arguments):
    trainer = trainer_of(folder, callback, kind=Recording, eval_dataset=Short(), **arguments)
    trainer.seen, trainer.saved, trainer.batches = [], [], []
    for each in trainer.model.modules():
        if isinstance(each, torch.nn.Dropout):
            each.p = 0.0  # a plain loop has other random numbers
    return trainer


class Short(Texts):
    def __len__(self):
        return 8


def of_updates(folder, how, saved, arguments):
    """The digests of a training, of one that resumes it, and of a plain loop over its batches; and what was seen."""
    found, seen = [], []
    arguments = {"save_steps": saved, "eval_strategy": "steps", "eval_steps": 1, "logging_steps": 1} | arguments
    for at in (None, f"{folder}/checkpoint-{saved}"):
        callback = Compression(how)
        trainer = recording(folder, callback, **arguments)
        trainer.train(resume_from_checkpoint=at)
        found.append((digest(trainer.model.parameters()), callback.attachment.steps))
        logged = [each for each in trainer.state.log_history if "gckernels/step" in each]
        assert len(logged) == STEPS and logged[-1]["gckernels/step"] <= callback.attachment.steps
        seen.append((trainer.seen, trainer.saved))
        if at is None:
            batches = trainer.batches
        dist.barrier()
    found.append(plain(f"{folder}/plain", how, batches, arguments))
    return found, seen


def plain(folder, how, batches, arguments):
    """The digest of a loop that has the losses and the optimizer of a trainer, and no other part of it."""
    trainer = recording(folder, None, **arguments)
    optimizer = trainer.create_optimizer()
    schedule = trainer.create_scheduler(STEPS, optimizer)
    model = trainer.model.train()
    attachment = sync.attach(model, dataclasses.replace(how, optimizer=optimizer))
    accumulated = trainer.args.gradient_accumulation_steps
    for number, (inputs, rest, named) in enumerate(batches):
        with torch.autocast("cpu", torch.bfloat16, enabled=trainer.args.bf16):
            loss = trainer.compute_loss(model, inputs, *rest, **named)
        if named.get("num_items_in_batch") is None:
            loss = loss / accumulated
        loss.backward()
        if (number + 1) % accumulated == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    attachment.end_round()
    found = digest(model.parameters()), attachment.steps
    attachment.close()
    return found


@pytest.mark.parametrize(
    ("how", "saved", "arguments"),
    [
        (updates(2), 4, {"max_grad_norm": 0.1, "lr_scheduler_type": "cosine"}),
        (updates(3), 4, {"gradient_accumulation_steps": 2, "bf16": True}),
        (updates(5, delay=2), 4, {"lr_scheduler_type": "linear"}),
    ],
)
def test_updates_are_those_of_a_plain_loop_and_resume_with_the_same_bits(how, saved, arguments, tmp_path):
    """Also where evaluations and checkpoints are inside a round. All ranks evaluate the model that is saved."""
    ranks = values_of(run_ranks(2, of_updates, str(tmp_path), how, saved, arguments, timeout_s=280))
    for (whole, again, expected), (of_whole, of_again) in ranks:
        assert whole == again
        assert whole == expected
        assert of_whole[0][-len(of_again[0]) :] == of_again[0]
    assert ranks[0][0] == ranks[1][0]
    (seen, saves), (seen_elsewhere, _) = ranks[0][1][0], ranks[1][1][0]
    assert seen == seen_elsewhere
    assert saves[0] in seen, "the model that is saved was evaluated"


def of_shards(folder):
    sharded = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 2}}
    with pytest.raises(
        ValueError, match="Compression: updates are averaged between ranks that have the same parameter"
    ):
        trainer_of(folder, Compression(updates(2)), **sharded).train()


def test_updates_of_shards_are_refused(tmp_path):
    values_of(run_ranks(2, of_shards, str(tmp_path)))


def best(folder):
    """A trainer that loads its best model at the end keeps that."""
    arguments = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": SAVED, "learning_rate": 1e-1}
    callback = Compression(updates(3))
    trainer = recording(folder, callback, **arguments)
    trainer.train()
    at = trainer.state.best_model_checkpoint
    expected = GPT2LMHeadModel.from_pretrained(at)
    return digest(trainer.model.parameters()), digest(expected.parameters()), callback.attachment._frontend.is_open


def test_the_best_model_stays(tmp_path):
    for found, expected, is_open in values_of(run_ranks(2, best, str(tmp_path))):
        assert found == expected and not is_open
