"""Time one step of a chain against the fastest spelling of it in torch, and other libraries.

    python -m benchmarks.step                           # all of it, on the GPU if there is one
    python -m benchmarks.step --device cpu --shapes tiny --chains "clip + Adam" --seconds 3
    python -m benchmarks.step --quick                   # does it run? a few seconds
    python -m benchmarks.step --measure compile         # the time to compile

All contestants of a comparison run in one process. One round is one step of each, in an order that
is drawn for each round. A ratio is the median of the ratios within a round, and its quartiles
follow in brackets. Before each step the gradients are refilled, outside the clock. After three
rounds, spellings in torch that take more than 1.5 times as long as the fastest one leave, and so do
other contestants that take more than three times as long as ours. The others continue until
`--seconds` are over, and run seven rounds at least. The machine should do nothing else meanwhile:
if other processes take more than 5 % of the CPU time, the lines say "busy" and decide nothing.

The standard output has one line for each comparison, and below the lines their circumstances. The
time of every contestant goes to the standard error and into `results/step_DEVICE.csv`.

"torch" is what one would write by hand. Every implementation that torch documents takes part: the
fused kernel, the operators for lists (foreach), and one tensor at a time (loop). Our time is
divided by the time of the fastest one, and the line names it. `torch.compile` of a step takes no
part, since compiling it takes longer than a whole comparison. "fused kernel that scales" hands the
clip to the kernel of torch's fused Adam, as GradScaler does. It sets attributes that torch does not
document, so it has a line of its own without a bar.

Other libraries take part if they have the same chain and are installed; the others are listed. They
need a separate environment, and some would bring another torch without `--no-deps`:

    python3 -m venv .venv-peers
    .venv-peers/bin/pip install -c constraints.txt -e '.[plot]'
    .venv-peers/bin/pip install --no-deps torchzero heavyball pytorch_optimizer
    .venv-peers/bin/python -m benchmarks.step

Tried with torchzero 0.4.4, heavyball 3.2.1 and pytorch_optimizer 4.1.0.

The floor of a chain is the time that the bytes it must move would take at the bandwidth that
torch's fused Adam alone reaches in the same rounds: every input is read once, every output is
written once, and the values that a norm measures are read once more before they are scaled.
"""
