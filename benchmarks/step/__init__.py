"""Time one step of a chain against the fastest spelling of it in torch, and other libraries.

    python -m benchmarks.step                           # all of it, on the GPU where there is one
    python -m benchmarks.step --device cpu --shapes tiny --chains "clip + Adam" --seconds 3
    python -m benchmarks.step --quick                   # does it run? a few seconds
    python -m benchmarks.step --compile                 # the time to compile as well

All contestants of a comparison run in one process. One round is one step of each, in an order drawn
anew; a figure is the median over rounds, a ratio the median of the ratios within a round, with its
quartiles. Before each step the gradients are what they were, outside the clock. After seven rounds
those who take more than three times as long as ours leave, and the others go on for `--seconds`.
The machine should do nothing else meanwhile.

"torch" is what one would write by hand: each spelling that is known to be fast takes part, and the
fastest of them is the one to beat. Other libraries take part where they have the same chain and are
installed; those that are not are listed. They go into an environment of their own, without their
dependencies where those would bring another torch:

    python3 -m venv .venv-peers
    .venv-peers/bin/pip install -c constraints.txt -e '.[plot]'
    .venv-peers/bin/pip install --no-deps torchzero heavyball pytorch_optimizer
    .venv-peers/bin/python -m benchmarks.step

Tried with torchzero 0.4.4, heavyball 3.2.1 and pytorch_optimizer 4.1.0.

"fused kernel that scales" hands the clip to the kernel of torch's fused Adam, as GradScaler does.
It takes attributes that torch does not document, so it is shown beside the spellings, and no bar
counts it.

The floor of a chain is the time that the bytes it must move would take at the bandwidth that
torch's fused Adam alone reaches in the same rounds: every input read once and every output written
once, and what a norm measures once more before the first entry can be scaled.
"""
