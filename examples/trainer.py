"""A vision transformer on scikit-learn's digits, trained by the `Trainer` of transformers with KFAC in place of AdamW.

The loop, the evaluation and the schedule stay those of Trainer. `lr` stays 1: KFAC finds the length of a step.

    python examples/trainer.py   # needs transformers, accelerate and scikit-learn: pip install -e ".[test]"
"""

import argparse
import time

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from transformers import PrinterCallback, Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

from optimizers import KFAC

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=10)
EPOCHS = parser.parse_args().epochs
torch.set_num_threads(1)  # small matrices: more threads wait for each other

images, labels = load_digits(return_X_y=True)
images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
digits = [{"pixel_values": image, "labels": label} for image, label in zip(images, labels, strict=True)]
train_digits, test_digits = train_test_split(digits, test_size=360, random_state=0, stratify=labels)

torch.manual_seed(0)
size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
model = ViTForImageClassification(ViTConfig(image_size=8, patch_size=2, num_channels=1, num_labels=10, **size))
print(f"a vision transformer of {model.num_parameters():,} parameters, {len(train_digits):,} digits, {EPOCHS} epochs")

opt = KFAC(model)
args = TrainingArguments(
    "out/trainer",
    num_train_epochs=EPOCHS,
    per_device_train_batch_size=64,
    per_device_eval_batch_size=360,
    lr_scheduler_type="cosine",
    max_grad_norm=0,  # KFAC clips gradients itself
    eval_strategy="epoch",
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
)
trainer = Trainer(
    model=model,
    args=args,
    train_dataset=train_digits,
    eval_dataset=test_digits,
    compute_metrics=lambda outcome: {"accuracy": (outcome.predictions.argmax(1) == outcome.label_ids).mean()},
    optimizers=(opt, None),  # None: the schedule named above
)
trainer.remove_callback(PrinterCallback)  # its entries are printed below, in short
began = time.perf_counter()
trainer.train()
seconds = time.perf_counter() - began

for entry in trainer.state.log_history:
    if "eval_loss" in entry:
        print(f"epoch {entry['epoch']:.0f}: test loss {entry['eval_loss']:.3f}, accuracy {entry['eval_accuracy']:.1%}")
print(f"{opt.steps} steps in {seconds:.0f} s")
