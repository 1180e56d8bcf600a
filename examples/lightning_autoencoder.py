"""An autoencoder of scikit-learn's digits in Lightning, trained with KFAC, compared with PCA of as many components.

The module is as for any other optimizer: `configure_optimizers` returns `KFAC(self)`.

    python examples/lightning_autoencoder.py   # needs lightning and scikit-learn: pip install -e ".[test]"
"""

import argparse
import logging
import time
import warnings

import lightning
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from optimizers import KFAC

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=20)
EPOCHS = parser.parse_args().epochs
torch.set_num_threads(1)  # small matrices: more threads wait for each other
CODE = 8  # numbers that stand for a digit

images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
train_images, test_images = train_test_split(images, test_size=360, random_state=0)


class Autoencoder(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 32), nn.Tanh(), nn.Linear(32, CODE))
        self.decoder = nn.Sequential(nn.Linear(CODE, 32), nn.Tanh(), nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 64))

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def training_step(self, batch, index):
        return F.mse_loss(self(batch[0]), batch[0])

    def validation_step(self, batch, index):
        self.log("test_error", F.mse_loss(self(batch[0]), batch[0]))

    def on_validation_epoch_end(self):
        epoch = self.current_epoch + 1
        if epoch in (1, 2, 5) or epoch % 10 == 0:
            print(f"epoch {epoch}: test error {self.trainer.callback_metrics['test_error']:.4f} per pixel")

    def configure_optimizers(self):
        opt = KFAC(self)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, self.trainer.estimated_stepping_batches)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")  # loaders without workers
torch.manual_seed(0)
model = Autoencoder()
trainer = lightning.Trainer(
    max_epochs=EPOCHS,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    num_sanity_val_steps=0,
)
began = time.perf_counter()
train_loader = DataLoader(TensorDataset(train_images), batch_size=128, shuffle=True)
trainer.fit(model, train_loader, DataLoader(TensorDataset(test_images), batch_size=360))
print(f"{trainer.global_step} steps in {time.perf_counter() - began:.0f} s")

pca = PCA(CODE).fit(train_images)
linear = torch.tensor(pca.inverse_transform(pca.transform(test_images))).float()
print(f"PCA with {CODE} components: test error {F.mse_loss(linear, test_images):.4f} per pixel")
