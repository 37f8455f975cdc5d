"""The schedule of a step: the needed operations, their loops, and the inlined values.

Each operation gets a phase. An even phase runs once for all groups. An odd phase is a loop over the
groups. An inlined value has no variable: its expression is written inside the operation that reads
the value.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from torchzero_clip.source.symbols import Names, Op, Value, Write, operand


def needed(ops: Sequence[Op]) -> list[Op]:
    """Return the operations whose results or effects the step needs."""
    memory = {op.out.memory for op in ops if op.out is not None and (op.takes or op.lasting)}
    read: set[Value] = set()
    chosen: list[Op] = []
    for op in reversed(ops):
        writes = {value.memory for value in op.writes}
        if writes & memory or (op.out is not None and op.out in read):
            chosen.append(op)
            for value in op.operands():
                read.add(value)
                memory.add(value.memory)
    return chosen[::-1]


def rebound(ops: Sequence[Op], passed_on: Collection[Value]) -> list[Op]:
    """Replace a copy and the in-place operator after it with one out-of-place operator.

    `x.copy_(y)` followed by an in-place operator of x becomes `x = operator(y)`. If an in-place
    operator without other operands follows `x = y.clone()`, both become `x = operator(y)`. A list
    that a later loop reads remains the same list object.
    """
    rewritten: list[Op] = []
    roots = {op.out.root for op in ops if op.out is not None}
    for op in ops:
        last = rewritten[-1] if rewritten else None
        if last is None or not op.writes:
            rewritten.append(op)
        elif last.clones and op.alone and op.args == [last.out]:
            rewritten[-1] = _of_original(last, op)
        elif last.copies and op.foreach and op.args == last.args[:1]:
            x, y = last.args
            shared = x.root is not None or x in roots or x in passed_on
            computed = x.op is not None and x.op.foreach and not x.op.takes
            if computed and not shared:
                rewritten[-1] = _assigned(op, x, y)
            else:
                rewritten.append(op)
        else:
            rewritten.append(op)
    return rewritten


def with_step_size(ops: list[Op]) -> list[Op]:
    """Turn the last multiplication by a hyperparameter into `alpha` of the last subtraction."""
    if len(ops) < 2 or not ops[-2].scales or ops[-2].args[0] is not ops[-1].args[1]:
        return ops
    factor = ops[-2].args[1]

    def write(names: Names) -> str:
        return f"{ops[-1].write(names)[:-1]}, alpha={operand(factor, names)})"

    return [
        *ops[:-2],
        replace(ops[-1], write=write, args=[*ops[-1].args, factor], link=ops[-2].link),
    ]


def _out_of_place(op: Op, x: Value | None, y: Value) -> Write:
    """Return the function that writes operator(y), given an in-place operator on x."""

    def write(names: Names) -> str:
        text = op.write(lambda value: names(y) if value is x else names(value))
        return text.replace("_(", "(", 1)

    return write


def _of_original(clone: Op, op: Op) -> Op:
    """Return x = operator(y), given x = y.clone() and an in-place operator on x."""
    x = clone.out
    write = _out_of_place(op, x, clone.args[0])
    operator = replace(clone, write=write, clones=False, each=False, foreach=True)
    assert x is not None
    x.op = operator
    return operator


def _assigned(op: Op, x: Value, y: Value) -> Op:
    """Return x = operator(y), given x.copy_(y) and an in-place operator on x."""
    write = _out_of_place(op, x, y)
    return replace(op, write=lambda names: f"{names(x)} = {write(names)}", args=[x, y], writes=[x])


def depends(ops: Sequence[Op]) -> list[set[int]]:
    """Return, for each operation, the indices of the operations that must run before it."""
    index = {op.out: i for i, op in enumerate(ops) if op.out is not None}
    dependencies: list[set[int]] = []
    for i, op in enumerate(ops):
        before = {index[value] for value in op.operands() if value in index}
        writes = {value.memory for value in op.writes}
        reads = set(op.reads)
        for j in range(i):
            written = {value.memory for value in ops[j].writes}
            if written & (reads | writes) or writes & set(ops[j].reads):
                before.add(j)
        dependencies.append(before - {i})
    return dependencies


def phases(ops: Sequence[Op]) -> None:
    """Set the phase of each operation: even for all groups together, odd in a loop."""
    before = depends(ops)
    last = 1
    for i, op in enumerate(ops):
        if op.joint:
            # inside a mask, a loop has to compute the flags first
            op.phase = 0 if op.context.flags is None else 2
        elif op.takes:
            op.phase = 1
        else:
            op.phase = last
        for j in before[i]:
            if not ops[j].takes or op.joint:
                op.phase = max(op.phase, ops[j].phase + _gap(op, ops[j]))
        if not (op.joint or op.takes):
            last = op.phase
    after: list[set[int]] = [set() for _ in ops]
    for i, earlier in enumerate(before):
        for j in earlier:
            after[j].add(i)
    # each operation runs as late as possible, so that loops pass fewer values to later loops
    for i in reversed(range(len(ops))):
        op = ops[i]
        if not (op.writes or op.takes or op.lasting) and after[i]:
            latest = min(ops[k].phase - _gap(op, ops[k]) for k in after[i])
            op.phase = max(op.phase, latest)


def _gap(op: Op, other: Op) -> int:
    """Return by how many phases an operation must come after an operation that it depends on."""
    return 0 if op.joint == other.joint else 1


def uses(ops: Iterable[Op]) -> dict[Value, list[Op]]:
    """Return, for each value, the operations that read it."""
    readers: dict[Value, list[Op]] = {}
    for op in ops:
        for value in op.operands():
            readers.setdefault(value, []).append(op)
    return readers


def crossing(ops: Sequence[Op]) -> Iterator[Value]:
    """Yield the values of single groups that a later phase reads."""
    readers = uses(ops)
    for op in ops:
        if op.out is None or op.joint:
            continue
        if any(user.phase != op.phase for user in readers.get(op.out, [])):
            yield op.out


def inlined(ops: Sequence[Op]) -> set[Value]:
    """Return the values that are inlined.

    Only one operation reads such a value. No operation between the definition of the value and this
    read changes the operands of the value.
    """
    readers = uses(ops)
    index = {op: i for i, op in enumerate(ops)}
    chosen: set[Value] = set()
    reads: dict[Value, set[Value]] = {}
    for op in ops:
        out = op.out
        if out is None or op.takes or op.foreach or op.stays:
            continue
        users = readers.get(out, [])
        reads[out] = set(op.reads).union(*[reads.get(v, set()) for v in op.args if v in chosen])
        if len(users) != 1 or (out.hint and not op.gathers) or users[0].takes:
            continue
        user = users[0]
        near = user.phase == op.phase or (op.joint and _is_constant(op))
        if not near or user.context != op.context or user.gathers:
            continue
        if op.each and user.out is not None and user.joint:
            continue
        between = ops[index[op] + 1 : index[user]]
        if any({v.memory for v in other.writes} & reads[out] for other in between):
            continue
        chosen.add(out)
    return chosen


def _is_constant(op: Op) -> bool:
    """Return whether an operation reads only tensors and numbers, and is not `lasting`."""
    return not op.lasting and all(value.kind in ("tensor", "number") for value in op.args)
