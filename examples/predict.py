"""Train, then score clicks by the checkpoint alone.

What serves a model needs neither its data nor its run.

Run: pibroch train --run-dir runs/first && python examples/predict.py runs/first
"""

import sys

import torch

import pibroch as pb


def main(path: str) -> torch.Tensor:
    predictor = pb.Predictor.open(
        path
    )  # a run's best checkpoint, or a checkpoint folder; every byte is verified
    num_samples = 4
    num_dense = len(predictor.schema.dense)
    ids = torch.randint(
        2, (len(predictor.features), num_samples)
    )  # a row of each feature's table for each sample
    labels = torch.zeros(num_samples)  # not looked at
    batch = pb.JaggedBatch.from_one_hot(
        torch.rand(num_samples, num_dense), predictor.features, ids, labels
    )
    return predictor(batch)  # probabilities [B], from any thread


if __name__ == "__main__":
    print("scores", main(sys.argv[1]).tolist())
