"""The digits example, which chooses by itself how often commits become durable."""

import argparse

import hvdrecover.torch as recover
from hvdrecover.examples import torch_digits

fixed = torch_digits.options


def options(*arguments: str) -> argparse.Namespace:
    chosen = fixed(*arguments)
    chosen.checkpoint = recover.Checkpoint(chosen.checkpoint, interval="auto")
    return chosen


torch_digits.options = options
torch_digits.main()
