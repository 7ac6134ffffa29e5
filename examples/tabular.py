"""Regression on a table with plain DistributedDataParallel: an elastic job of any number of workers, or one process.

    python examples/tabular.py --epochs 20
    kfp-elastic run --nodes 1:2 examples/tabular.py -- --epochs 20

Without `--data` it trains on scikit-learn's diabetes set; with it, on a folder that the `preprocess` component wrote.
The target is standardised for training, and the saved model gives predictions in its own unit.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastic_runtime import worker
from elastic_runtime.models import save_model


class Rescaled(nn.Module):
    """A network whose output is turned back into the target's unit."""

    def __init__(self, net, mean, scale):
        super().__init__()
        self.net = net
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32))
        self.register_buffer("scale", torch.tensor(scale, dtype=torch.float32))

    def forward(self, inputs):
        return self.net(inputs) * self.scale + self.mean


def load(folder):
    """Return features (n, d), targets (n,), feature names and target name."""
    if folder:
        from elastic_runtime.datasets import load_split, read_manifest

        manifest, split = read_manifest(folder), load_split(folder, "train")
        return split.features, split.target, list(manifest.features), manifest.target
    from sklearn.datasets import load_diabetes

    diabetes = load_diabetes()
    features = (diabetes.data - diabetes.data.mean(0)) / diabetes.data.std(0)
    return features.astype("float32"), diabetes.target, list(diabetes.feature_names), "progression"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="", help="dataset folder; scikit-learn's diabetes set without it")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=32, help="samples of a step over all workers")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--weight-decay", type=float, default=1e-1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint-every", type=int, default=20, help="steps between two checkpoints")
    args = parser.parse_args()

    context = worker.context()
    if context.distributed:
        dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    features, values, names, target = load(args.data)
    inputs, targets = torch.as_tensor(features), torch.as_tensor(values, dtype=torch.float32)
    mean, scale = targets.mean().item(), max(targets.std().item(), 1e-6)

    net = nn.Sequential(nn.Linear(inputs.shape[1], 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    start = 0
    if restored := worker.checkpoint.load(context.checkpoint_dir):
        state, start = restored
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        print(f"resumed at step {start}")
    model = DistributedDataParallel(net) if context.distributed else net

    samples = start * args.batch_size
    for batch in worker.batches(
        len(inputs),
        global_batch=args.batch_size,
        epochs=args.epochs,
        seed=args.seed,
        rank=context.rank,
        world_size=context.world_size,
        start=start,
    ):
        wanted = (targets[batch.indices] - mean) / scale
        share = nn.functional.mse_loss(model(inputs[batch.indices]).squeeze(1), wanted, reduction="sum")
        # DDP averages over workers; this share of the global mean, times their number, makes the average exact.
        loss = share * context.world_size / batch.global_size
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step, samples = batch.step + 1, samples + batch.global_size
        if context.rank == 0 and step % args.checkpoint_every == 0:
            state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
            worker.checkpoint.save(context.checkpoint_dir, state, step=step)
        worker.log(step=step, loss=loss.item(), samples=samples)

    if context.rank == 0:
        save_model(
            context.output_dir,
            Rescaled(net, mean, scale),
            inputs[:2],
            task="regression",
            features=names,
            target=target,
            extra={"epochs": args.epochs, "batch_size": args.batch_size, "lr": args.lr, "seed": args.seed},
        )
        print(f"model saved to {context.output_dir}")
    if context.distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
