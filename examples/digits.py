"""Handwritten digits with plain DistributedDataParallel: an elastic job of any number of workers, or one process.

    python examples/digits.py --epochs 3
    kfp-elastic run --nodes 1:3 examples/digits.py -- --epochs 3
    torchx run -s local_cwd elastic.ddp -j 1:3x1 --script examples/digits.py -- --epochs 3

Without `--data` it trains on scikit-learn's digits; with it, on a folder that the `preprocess` component wrote.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastic_runtime import worker
from elastic_runtime.models import save_model


def load(folder):
    """Return features (n, 64), labels (n,), feature names, target name and class names."""
    if folder:
        from elastic_runtime.datasets import load_split, read_manifest

        manifest, split = read_manifest(folder), load_split(folder, "train")
        return split.features, split.target, list(manifest.features), manifest.target, list(manifest.classes)
    from sklearn.datasets import load_digits

    digits = load_digits()
    return (
        digits.data.astype("float32") / 16,
        digits.target,
        list(digits.feature_names),
        "digit",
        [str(name) for name in digits.target_names],
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="", help="dataset folder; scikit-learn's digits without it")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="samples of a step over all workers")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint-every", type=int, default=10, help="steps between two checkpoints")
    args = parser.parse_args()

    context = worker.context()
    if context.distributed:
        dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    features, labels, names, target, classes = load(args.data)
    inputs, targets = torch.as_tensor(features), torch.as_tensor(labels)

    net = nn.Sequential(
        nn.Linear(inputs.shape[1], 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, len(classes))
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr)
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
        # DDP averages over workers; this share of the global mean, times their number, makes the average exact.
        share = nn.functional.cross_entropy(
            model(inputs[batch.indices]), targets[batch.indices], reduction="sum"
        )
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
            net,
            inputs[:2],
            task="classification",
            features=names,
            target=target,
            classes=classes,
            extra={"epochs": args.epochs, "batch_size": args.batch_size, "lr": args.lr, "seed": args.seed},
        )
        print(f"model saved to {context.output_dir}")
    if context.distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
