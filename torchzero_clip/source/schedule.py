"""Schedule: which operations are needed, in which loop over the groups, and which have a line."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from torchzero_clip.source.symbols import Names, Op, Value, operand


def needed(ops: Sequence[Op]) -> list[Op]:
    """The operations without those whose result nobody reads."""
    lasting = {op.out.memory for op in ops if op.out is not None and (op.repeats or op.lasting)}
    wanted: set[Value] = set()
    memory = set(lasting)
    out: list[Op] = []
    for op in reversed(ops):
        writes = {value.memory for value in op.writes}
        if (op.effect and writes & memory) or (op.out is not None and op.out in wanted):
            out.append(op)
            for value in op.operands():
                wanted.add(value)
                memory.add(value.memory)
    return out[::-1]


def rebound(ops: Sequence[Op], kept: Collection[Value]) -> list[Op]:
    """x.copy_(y), then an operator of x alone in place: one that makes x of y anew.

    Lists that are kept for later loops stay the same lists.
    """
    out: list[Op] = []
    roots = {op.out.root for op in ops if op.out is not None}
    for op in ops:
        last = out[-1] if out else None
        if last is not None and last.clones and op.alone and op.effect and op.args == [last.out]:
            out[-1] = _instead(last, op)
            continue
        if (
            last is not None
            and last.copies
            and op.foreach
            and op.effect
            and op.args == last.args[:1]
        ):
            x, y = last.args
            own = (
                x.root is None
                and x not in roots
                and x not in kept
                and x.made is not None
                and x.made.foreach
            )
            if own and x.made is not None and not x.made.repeats:
                op = _anew(op, x, y)
                out.pop()
        out.append(op)
    return out


def stepped(ops: list[Op]) -> list[Op]:
    """A factor just before the end becomes that of the last subtraction."""
    if len(ops) < 2 or not ops[-2].scales or ops[-2].args[0] is not ops[-1].args[1]:
        return ops
    factor = ops[-2].args[1]

    def write(names: Names) -> tuple[str, int]:
        text, binds = ops[-1].write(names)
        return f"{text[:-1]}, alpha={operand(factor, names)[0]})", binds

    return [
        *ops[:-2],
        replace(ops[-1], write=write, args=[*ops[-1].args, factor], link=ops[-2].link),
    ]


def _instead(clone: Op, op: Op) -> Op:
    """x = y.clone(), then an operator of x alone in place: the operator of y."""
    x, y = clone.out, clone.args[0]

    def write(names: Names) -> tuple[str, int]:
        text, binds = op.write(lambda value: names(y) if value is x else names(value))
        return text.replace("_(", "(", 1), binds

    made = replace(clone, write=write, clones=False, each=False, foreach=True)
    assert x is not None
    x.made = made
    return made


def _anew(op: Op, x: Value, y: Value) -> Op:
    def write(names: Names) -> tuple[str, int]:
        text, binds = op.write(lambda value: names(y) if value is x else names(value))
        return f"{names(x)} = {text.replace('_(', '(', 1)}", binds

    return replace(op, write=write, args=[x, y], writes=[x])


def depends(ops: Sequence[Op]) -> list[set[int]]:
    """For each operation the indexes of those before it that it must come after."""
    made = {op.out: i for i, op in enumerate(ops) if op.out is not None}
    found: list[set[int]] = []
    for i, op in enumerate(ops):
        before = {made[value] for value in op.operands() if value in made}
        writes, reads = {v.memory for v in op.writes}, set(op.reads)
        for j in range(i):
            theirs = {v.memory for v in ops[j].writes}
            if theirs & (reads | writes) or writes & set(ops[j].reads):
                before.add(j)
        found.append(before - {i})
    return found


def phases(ops: Sequence[Op]) -> None:
    """Give each operation its phase: even ones are for all groups, odd ones loops over them."""
    before, last = depends(ops), 1
    for i, op in enumerate(ops):
        first = 0 if op.context.flags is None else 2  # a mask asks groups for parameters before
        op.phase = first if op.joint else 1 if op.repeats else last
        for j in before[i]:
            if not ops[j].repeats or op.joint:
                op.phase = max(op.phase, ops[j].phase + (ops[j].joint != op.joint))
        if (op.phase % 2 == 0) != op.joint:
            op.phase += 1
        last = last if op.joint or op.repeats else op.phase
    after: list[set[int]] = [set() for _ in ops]
    for i, some in enumerate(before):
        for j in some:
            after[j].add(i)
    for i in reversed(range(len(ops))):  # as late as may be: fewer values go from loop to loop
        op = ops[i]
        if not (op.effect or op.repeats or op.lasting) and after[i]:
            op.phase = max(
                op.phase, min(ops[k].phase - (ops[k].joint != op.joint) for k in after[i])
            )


def uses(ops: Iterable[Op]) -> dict[Value, list[Op]]:
    """The operations that read each value."""
    found: dict[Value, list[Op]] = {}
    for op in ops:
        for value in op.operands():
            found.setdefault(value, []).append(op)
    return found


def crossing(ops: Sequence[Op]) -> Iterator[Value]:
    """The values of groups that a later phase reads."""
    readers = uses(ops)
    for op in ops:
        users = readers.get(op.out, []) if op.out is not None and not op.joint else []
        if op.out is not None and any(user.phase != op.phase for user in users):
            yield op.out


def inlined(ops: Sequence[Op]) -> set[Value]:
    """Values that are written where they are used: once, and before what they read changes."""
    readers, place = uses(ops), {op: i for i, op in enumerate(ops)}
    chosen: set[Value] = set()
    reads: dict[Value, set[Value]] = {}
    for op in ops:
        out = op.out
        if out is None or op.repeats or op.foreach or op.stays:
            continue
        some = readers.get(out, [])
        reads[out] = set(op.reads).union(*[reads.get(v, set()) for v in op.args if v in chosen])
        if len(some) != 1 or (out.hint and not op.small) or some[0].takes:
            continue
        user = some[0]
        near = user.phase == op.phase or (op.joint and _plain(op))
        if not near or user.context != op.context or user.gathers:
            continue
        if op.each and user.out is not None and user.joint:
            continue
        between = ops[place[op] + 1 : place[user]]
        if any({v.memory for v in other.writes} & reads[out] for other in between):
            continue
        chosen.add(out)
    return chosen


def _plain(op: Op) -> bool:
    """Whether it is about tensors that stay as they are."""
    return not op.lasting and all(value.kind in ("tensor", "number") for value in op.args)
