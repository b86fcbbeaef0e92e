"""`python -m mha2gqa …`, `torchrun -m mha2gqa …`, `accelerate launch -m mha2gqa …`."""

from .cli.commands import main

if __name__ == "__main__":
    main()
