"""A classifier that survives the loss of workers without starting again. The same file runs plainly:

    python examples/elastic_digits.py --epochs 3
    kfp-elastic run --nodes 1:3 examples/elastic_digits.py -- --epochs 3
    torchx run -s local_cwd elastic.ddp -j 1:3x1 --script examples/elastic_digits.py -- --epochs 3

Without `--data` it trains on scikit-learn's digits; with it, on a folder that the `preprocess` component wrote.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastic_runtime as elastic
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
    args = parser.parse_args()

    # What is made here, once a process, stays through every change of the workers.
    features, labels, names, target, classes = load(args.data)
    inputs, targets = torch.as_tensor(features), torch.as_tensor(labels)
    dataset = TensorDataset(inputs, targets)
    torch.manual_seed(args.seed)
    net = nn.Sequential(
        nn.Linear(inputs.shape[1], 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, len(classes))
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr)

    def train(job: elastic.Job) -> None:
        model = job.attach(model=net, optimizer=optimizer)
        for step in job.steps(dataset, global_batch=args.batch_size, epochs=args.epochs):
            for x, y in step:  # this worker's share of the global batch
                step.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            job.log(lr=args.lr)
        if job.rank == 0:
            with job.phase("save"):
                save_model(
                    job.output_dir,
                    net,
                    inputs[:2],
                    task="classification",
                    features=names,
                    target=target,
                    classes=classes,
                    extra={
                        "epochs": args.epochs,
                        "batch_size": args.batch_size,
                        "lr": args.lr,
                        "seed": args.seed,
                    },
                )
            print(f"model saved to {job.output_dir} after {job.global_step} steps")

    elastic.run(train, seed=args.seed)


if __name__ == "__main__":
    main()
