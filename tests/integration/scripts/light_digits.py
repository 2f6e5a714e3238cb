"""The digits example without torch's compiler, which takes half of a worker's start."""

import without_dynamo  # noqa: F401

from hvdrecover.examples.torch_digits import main

main()
