"""One rank of a job that trains each case twice, with the Trainer of Transformers and with ours: transformers_rank.py OUT.

Saves as OUT.<rank>, for each case, what both have at the end; and the messages of what is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel, PreTrainedModel

import commsched
from commsched.plugins.transformers import ScheduledTrainerMixin, Trainer
from tests.plugins.shared_directory import shared_directory

Values = dict[str, torch.Tensor]


class ScheduledSeq2SeqTrainer(ScheduledTrainerMixin, transformers.Seq2SeqTrainer):
    pass


def rank() -> int:
    return int(torch.distributed.get_rank())


def classifier(seed: int = 0) -> PreTrainedModel:
    """Another one on each rank: it is rank 0's that counts."""
    torch.manual_seed(10 * rank() + seed)
    config = BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
        num_labels=3,
    )
    return BertForSequenceClassification(config)


def language_model() -> PreTrainedModel:
    torch.manual_seed(10 * rank())
    config = GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


def sentences(count: int, labelled: bool) -> list[dict[str, Any]]:
    """Some padded, so that ranks have different numbers of tokens."""
    numbers = torch.Generator().manual_seed(3)
    rows = []
    for row in range(count):
        words = torch.randint(1, 40, (8,), generator=numbers)
        mask = (torch.arange(8) < 8 - row % 3).long()
        labels = words.masked_fill(mask == 0, -100) if not labelled else words.sum() % 3
        rows.append({"input_ids": words, "attention_mask": mask, "labels": labels})
    return rows


def arguments(directory: str, kind: type[Any] = transformers.TrainingArguments, **more: Any) -> Any:
    settings: dict[str, Any] = {
        "output_dir": directory,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.01,
        "num_train_epochs": 1,
        "logging_steps": 1,
        "save_strategy": "no",
    }
    return kind(**{**settings, **more})


def logged(trainer: transformers.Trainer) -> Values:
    """What it logged about the training, and not about its speed."""
    names = ("loss", "learning_rate", "eval_loss", "eval_right", "train_loss")
    if isinstance(trainer, ScheduledTrainerMixin):
        assert any("loss" in entry and "commsched/step_seconds" in entry for entry in trainer.state.log_history)
        assert not any("commsched/step_seconds" in entry for entry in trainer.state.log_history if "loss" not in entry)
    history = trainer.state.log_history
    values = [float(entry[name]) for entry in history for name in names if name in entry]
    norms = [float(entry["grad_norm"]) for entry in history if "grad_norm" in entry]
    assert values
    assert norms
    return {"logged": torch.tensor(values, dtype=torch.float64), "norms": torch.tensor(norms, dtype=torch.float64)}


def weights(trainer: transformers.Trainer) -> Values:
    assert trainer.model is not None
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def right(prediction: transformers.EvalPrediction) -> dict[str, float]:
    return {"right": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


# --- cases: train, and return what is to be equal ---


def as_documented(kind: type[transformers.Trainer], directory: str) -> Values:
    """Clips by default; evaluates, predicts, and saves what can be loaded."""
    trainer = kind(
        model=classifier(),
        args=arguments(directory, max_grad_norm=0.5, eval_strategy="steps", eval_steps=2),
        train_dataset=sentences(42, labelled=True),
        eval_dataset=sentences(10, labelled=True),
        compute_metrics=right,
    )
    trainer.train()
    predictions = torch.tensor(trainer.predict(sentences(6, labelled=True)).predictions)
    trainer.save_model(f"{directory}/saved")
    torch.distributed.barrier()
    saved = BertForSequenceClassification.from_pretrained(f"{directory}/saved").state_dict()
    for name, value in weights(trainer).items():
        assert torch.equal(saved[name], value), name
    return {**weights(trainer), **logged(trainer), "predictions": predictions}


def accumulated(kind: type[transformers.Trainer], directory: str) -> Values:
    """Tied weights, losses by the number of tokens of all ranks; no clipping, so the norm is there for the log only."""
    trainer = kind(
        model=language_model(),
        args=arguments(
            directory,
            gradient_accumulation_steps=3,
            max_grad_norm=0.0,
            lr_scheduler_type="cosine",
            warmup_steps=2,
            weight_decay=0.1,
            optim="adafactor",
            num_train_epochs=2,
            logging_steps=2,
        ),
        train_dataset=sentences(56, labelled=False),
    )
    norms = count_calls(trainer.accelerator, "clip_grad_norm_")
    trainer.train()
    assert sum("grad_norm" in entry for entry in trainer.state.log_history) == 3
    assert len(norms) == (3 if isinstance(trainer, Trainer) else 6), len(norms)
    return {**weights(trainer), **logged(trainer)}


def count_calls(owner: Any, name: str) -> list[None]:
    """One more with each call."""
    calls: list[None] = []
    method = getattr(owner, name)

    def counted(*arguments: Any, **more: Any) -> Any:
        calls.append(None)
        return method(*arguments, **more)

    setattr(owner, name, counted)
    return calls


def mixed_precision(kind: type[transformers.Trainer], directory: str) -> Values:
    """And recomputed activations, of a subclass of Trainer."""
    subclass = transformers.Seq2SeqTrainer if kind is transformers.Trainer else ScheduledSeq2SeqTrainer
    args = arguments(
        directory,
        transformers.Seq2SeqTrainingArguments,
        bf16=True,
        activation_checkpointing=True,
        optim="adamw_torch",
        max_steps=4,
    )
    trainer = subclass(model=classifier(), args=args, train_dataset=sentences(40, labelled=True))
    trainer.train()
    return {**weights(trainer), **logged(trainer)}


def resumed(kind: type[transformers.Trainer], directory: str) -> Values:
    """From the second of four steps by a new trainer; it ends as what was not interrupted, and takes the best model."""

    def make(seed: int) -> transformers.Trainer:
        settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
        args = arguments(directory, load_best_model_at_end=True, **settings)
        data = sentences(40, labelled=True)
        return kind(model=classifier(seed), args=args, train_dataset=data, eval_dataset=data[:8])

    whole = make(0)
    whole.train()
    again = make(7)
    again.train(resume_from_checkpoint=f"{directory}/checkpoint-2")
    for name, value in weights(whole).items():
        assert torch.equal(weights(again)[name], value), name
    return {**weights(again), **logged(again)}


def trained_twice(kind: type[transformers.Trainer], directory: str) -> Values:
    """By one trainer, then by another one with the same model."""
    model = classifier()
    first = kind(model=model, args=arguments(directory, max_steps=2), train_dataset=sentences(40, labelled=True))
    first.train()
    first.train()
    second = kind(model=model, args=arguments(directory, max_steps=2), train_dataset=sentences(24, labelled=True))
    second.train()
    return {**weights(second), **logged(second)}


CASES = {case.__name__: case for case in (as_documented, accumulated, mixed_precision, resumed, trained_twice)}


# --- what is refused ---


def refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except commsched.CommschedError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def refusals(directory: str) -> dict[str, str]:
    def make(**settings: Any) -> Trainer:
        return Trainer(model=classifier(), args=arguments(directory, **settings), train_dataset=sentences(8, labelled=True))

    return {
        "a batch size to be found": refused(lambda: make(auto_find_batch_size=True)),
        "processes that Accelerate does not see": refused(lambda: make(use_cpu=False)),
    }


def main() -> None:
    results: dict[str, Any] = {}
    _ = arguments("").device  # the process group
    for name, case in CASES.items():
        results[name] = {}
        for whose, kind in (("theirs", transformers.Trainer), ("ours", Trainer)):
            with shared_directory() as directory:
                results[name][whose] = case(kind, directory)
    with shared_directory() as directory:
        results["refusals"] = refusals(directory)
    torch.save(results, f"{sys.argv[1]}.{rank()}")
    commsched.shutdown()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
