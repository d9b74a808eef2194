"""A private image classifier: fixed scattering features, one dense layer, the ordinary training loop.

Run it with ``python examples/image_classifier.py``; the images are the 8 x 8 digits of scikit-learn. The features are a
fixed map of each image, so only the dense layer is trained, and its bound is tight: a record's gradient is at most B
times the length of its features, B being the cap of the loss.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import weightclip as wc


def features(images: torch.Tensor, chunk: int = 500) -> torch.Tensor:
    """Scattering coefficients of each image, normalised image by image to unit length."""
    scattering = wc.nn.Scattering2d(J=1, shape=(8, 8))
    head = wc.models.ScatteringHead("linear", in_channels=9, size=4, groups=9)
    with torch.no_grad():
        parts = [head.input(scattering(part.unsqueeze(1)).flatten(1, 2)) for part in images.split(chunk)]
    return torch.cat(parts).flatten(1)


def main(records: int, epochs: int, epsilon: float, seed: int | None) -> float:
    """Train on ``records`` images, test on the last 360; returns the test accuracy in percent."""
    images, labels = load_digits(return_X_y=True)
    pixels, y = torch.tensor(images / 16.0).float().view(-1, 8, 8), torch.tensor(labels)
    shuffled = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    places = {"train": shuffled[: min(records, len(y) - 360)], "test": shuffled[-360:]}
    data = {part: (features(pixels[place]), y[place]) for part, place in places.items()}

    torch.manual_seed(0)
    model = torch.nn.Linear(data["train"][0].shape[1], 10)
    torch.nn.init.zeros_(model.weight)
    engine = wc.PrivacyEngine()
    model, optimizer, loader, loss = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.05),
        data_loader=DataLoader(TensorDataset(*data["train"]), batch_size=max(1, records // 10)),
        criterion=wc.losses.CrossEntropy(cap=0.25),
        target_epsilon=epsilon,
        target_delta=1e-5,
        epochs=epochs,
        bounds=wc.Bounds(input_radius=1.0, bias_scale=0.1),
        generator=None if seed is None else torch.Generator().manual_seed(seed),
    )
    average = wc.nn.ParameterAverage(model, decay=0.9)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
            average.update()

    x, y = data["test"]
    with average.apply(), torch.no_grad():
        accuracy = 100 * float((model(x).argmax(1) == y).double().mean())
    print(f"{records} records, epsilon {engine.get_epsilon(delta=1e-5):.3f}, test accuracy {accuracy:.1f}%")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=1437)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=None, help="only for experiments: fixes the noise")
    options = parser.parse_args()
    main(options.records, options.epochs, options.epsilon, options.seed)
