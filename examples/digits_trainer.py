"""A vision transformer on the digits with the Trainer of Hugging Face Transformers, data-parallel.

    torchrun --standalone --nproc-per-node=2 examples/digits_trainer.py
    commsched run -n 2 -- python examples/digits_trainer.py

The one line of commsched is marked; with ``from transformers import Trainer`` instead, it is plain Transformers. Without GPUs,
the Trainer makes use of several processes only when ``use_cpu=True`` is said.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from digits import load
from transformers import EvalPrediction, TrainingArguments, ViTConfig, ViTForImageClassification

from commsched.plugins.transformers import Trainer  # line 1


def rows(images: torch.Tensor, labels: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    return [{"pixel_values": image, "labels": label} for image, label in zip(images, labels, strict=True)]


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32, help="images per rank and step")
    args = parser.parse_args()

    images, labels, test_images, test_labels = load()
    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
        num_labels=10,
    )
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(
            model=ViTForImageClassification(config),
            args=TrainingArguments(
                directory,
                use_cpu=not torch.cuda.is_available(),
                num_train_epochs=args.epochs,
                per_device_train_batch_size=args.batch,
                learning_rate=2e-3,
                eval_strategy="epoch",
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=rows(images, labels),
            eval_dataset=rows(test_images, test_labels),
            compute_metrics=accuracy,
        )
        trainer.train()
        trainer.evaluate()


if __name__ == "__main__":
    main()
