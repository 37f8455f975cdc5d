"""Lines: the operations of a step as statements of Python."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import Any

from torchzero_clip.source import schedule
from torchzero_clip.source.values import ATOM, Context, Op, Value, operand

WIDTH = 88
TAKEN = {"group", "groups", "first", "loss", "closure", "self", "torch", "state", "key", "rows"}
TAKEN |= {"i", "x", "y", "z", "v", "w", "s", "t_", "p", "g", "k"}
LETTERS = {"params": "p", "grads": "g", "layer": "k"}
INDENT = "    "


class Lines:
    """The body of `step`.

    Args:
        ops: The operations that are needed.
        about: The comment above the lines of a link, by its path.
        state: The contexts that have state.
    """

    def __init__(
        self,
        ops: Sequence[Op],
        about: dict[str, list[str]],
        state: Any,
        tuples: dict[str, list[str]],
    ) -> None:
        self.about, self.state, self.tuples = about, state, tuples
        ops = schedule.stepped(schedule.rebound(schedule.needed(ops)))
        schedule.phases(ops)
        self.inputs = [op for op in ops if op.repeats]
        self.ops = sorted([op for op in ops if not op.repeats], key=lambda op: op.phase)
        self.inline = schedule.inlined(self.ops)
        self.readers = schedule.uses(self.ops)
        self.crossing = self._crossing()
        self.lines: list[str] = []
        self.names: dict[str, Value] = {}
        self.types: dict[str, str] = {}
        self.commented: set[str] = set()
        self.ready: set[Op | str] = set()
        self.split: set[Value] = set()
        self.unpacked: dict[str, list[str]] = {}
        self.indent, self.phase, self.at = 2, 0, 0

    # ------------------------------------------------------------------ loops

    @property
    def joint(self) -> bool:
        """Whether anything is for all groups."""
        return any(op.joint for op in self.ops)

    def write(self) -> list[str]:
        """The lines."""
        for phase in sorted({op.phase for op in self.ops}):
            some = [op for op in self.ops if op.phase == phase and op.out not in self.inline]
            if some:
                self._phase(phase, some)
        return self.lines

    def _crossing(self) -> list[Value]:
        """The values of groups that a later phase reads."""
        found = []
        for op in self.ops:
            users = self.readers.get(op.out, []) if op.out is not None else []
            if op.out is not None and not op.joint and any(u.phase != op.phase for u in users):
                found.append(op.out)
        return found

    def _phase(self, phase: int, ops: Sequence[Op]) -> None:
        self.phase, self.ready, self.unpacked = phase, set(), {}
        self.indent = 2
        if ops[0].joint:
            self._body(ops)
            return
        made = [op.out for op in ops if op.out in self.crossing]
        taken = self._taken(ops)
        for value in made:
            assert value is not None
            guarded = value.made is not None and self._guard(value.made) is not None
            self._name(value, fresh=guarded)
            self._line(f"all_{value.name}: list[Any] = []")
        if taken:
            names = ", ".join(["group", *[self._text(value) for value in taken]])
            lists = ", ".join(["groups", *[f"all_{value.name}" for value in taken]])
            loop = f"for {names} in zip({lists}, strict=True):"
            if len(loop) <= WIDTH - len(INDENT) * self.indent:
                self._line(loop)
            else:
                self._line("for i, group in enumerate(groups):")
                self.lines += [f"{INDENT * 3}{v.name} = all_{v.name}[i]" for v in taken]
        else:
            self._line(f"for group in {'groups' if self.joint else 'self.param_groups'}:")
        self.indent = 3
        if not self.joint:
            params = self._name(self._of("params", Context()))
            grads = self._name(self._of("grads", Context()))
            used = any(op.takes == "grads" and op.context == Context() for op in self.inputs)
            self._line(f"{params}, {grads if used else '_'} = _tensors(group)")
            self._line(f"if not {params}:")
            self._line("    continue")
        self._body(ops)

    def _taken(self, ops: Sequence[Op]) -> list[Value]:
        return [
            v
            for v in self.crossing
            if v.made is not None
            and v.made.phase < self.phase
            and any(user in self._whole(ops) for user in self.readers.get(v, []))
        ]

    def _whole(self, ops: Sequence[Op]) -> set[Op]:
        return {op for op in self.ops if op.phase == self.phase and not op.joint} | set(ops)

    def _body(self, ops: Sequence[Op]) -> None:
        block: list[Op] = []
        for op in [*ops, None]:
            if block and (op is None or self._guard(op) != self._guard(block[0])):
                self._block(block)
                block = []
            if op is not None:
                block.append(op)

    def _guard(self, op: Op) -> Context | None:
        return op.context if op.context.flags is not None and not op.always else None

    def _block(self, ops: Sequence[Op]) -> None:
        guard = self._guard(ops[0])
        if guard is None:
            for op in ops:
                self._op(op)
            return
        for op in ops:
            self._comment(op)
            for value in self._leaves(op):
                self._input(value)
        late = [op.out for op in ops if op.out in self.crossing and op.out is not None]
        for value in late:
            self._line(f"{value.name}: Any = []")
        self._line(f"if any({self._flags(guard, ops[0])}):")
        self.indent, before = self.indent + 1, set(self.ready)
        for op in ops:
            self._op(op)
        self.indent, self.ready = self.indent - 1, before
        for value in late:
            self._line(f"all_{value.name}.append({value.name})")

    def _flags(self, guard: Context, op: Op) -> str:
        """What is true where the parameters of a context are there: in a group, or in all."""
        assert guard.flags is not None
        if not op.joint:
            self._input(guard.flags)
            return guard.flags.name
        lists = [v for v in self.crossing if v.kind == "list" and v.context == guard]
        return f"all_{next(v.name for v in lists if v.name)}"

    # ------------------------------------------------------------------ statements

    def _op(self, op: Op) -> None:
        self._comment(op)
        for other in self._together(op):
            for value in self._leaves(other):
                self._input(value)
        self._unpack(op)
        self.at = self.ops.index(op)
        while len(text := self._statement(op)) > WIDTH - len(INDENT) * self.indent or "\0" in text:
            largest = self._largest(op)
            if largest is None:
                text = self._exploded(self._number_apart(op) or self._zipped(text))
                break
            self.inline.discard(largest)
            assert largest.made is not None
            self._op(largest.made)
        self._emit(op, text)
        if op.out in self.crossing and op.out is not None and self._guard(op) is None:
            self._line(f"all_{op.out.name}.append({op.out.name})")

    def _together(self, op: Op) -> list[Op]:
        """The operations of its link in this loop, before which its lists stand."""
        alike = (op.phase, op.link, op.context)
        return [other for other in self.ops if (other.phase, other.link, other.context) == alike]

    def _emit(self, op: Op, text: str) -> None:
        if op.each and op.out is None:
            head, body = text.split("\n")
            if self.lines and len(self.lines) > 1 and self._last_loop == (head, self.indent):
                self._line(INDENT + body)
            else:
                self._line(head)
                self._line(INDENT + body)
                self._last_loop = (head, self.indent)
                return
            self._last_loop = (head, self.indent)
            return
        for line in text.split("\n"):
            self._line(line)

    _last_loop: tuple[str, int] | None = None

    def _statement(self, op: Op) -> str:
        text = self._expression(op)
        if op.out is None:
            return text
        name = self._name(op.out)
        if op.out.kind == "list" and self.types[name] != op.out.elements:
            text = f"tuple({text[1:-1]})"  # of its name, which was a tuple before
        return f"{name} = {text}"

    def _exploded(self, text: str) -> str:
        """A call with an operand a line, where it is too long for one."""
        tree = ast.parse(text).body[0] if "\n" not in text else None
        call = getattr(tree, "value", None)
        short = len(text) <= WIDTH - len(INDENT) * self.indent
        if short or not isinstance(call, ast.Call) or not call.args:
            return text
        first, last = call.args[0], [*call.args, *[key.value for key in call.keywords]][-1]
        if isinstance(first, ast.GeneratorExp):
            return text
        encoded = text.encode()
        parts = [ast.unparse(x) for x in call.args]
        parts += [f"{key.arg}={ast.unparse(key.value)}" for key in call.keywords]
        head = encoded[: first.col_offset].decode()
        assert last is not None
        return "\n".join([head, *[f"{INDENT}{_double(part)}," for part in parts], ")"])

    def _number_apart(self, op: Op) -> str | None:
        """The statement with a name for the longest expression of numbers in it."""
        some = [v for v in op.args if v.kind == "number" and v.live is None]
        if not some:
            return None
        longest = max(some, key=lambda v: len(operand(v, self._text)[0]))
        text = operand(longest, self._text)[0]
        name = longest.hint or "factor"
        if len(f"{name} = {text}") > WIDTH - len(INDENT) * self.indent:
            text = self._leaves_apart(longest)
        self._line(f"{name} = {text}")
        longest.name = name
        found = self._statement(op)
        longest.name = ""
        return found

    def _leaves_apart(self, number: Value) -> str:
        """An expression of live values, which get names before it."""
        names: dict[tuple[str, int | None], str] = {}

        def named(value: Value) -> str:
            assert value.live is not None
            if value.live not in names:
                names[value.live] = value.live[0].rpartition("/")[2]
                self._line(f"{names[value.live]} = {self._live(value)}")
            return names[value.live]

        return operand(number, named)[0]

    def _zipped(self, text: str) -> str:
        """A comprehension whose lists come from a line before it."""
        found = re.search(r" in (zip\(.*, strict=True\))[\])]$", text)
        if found is None:
            return text
        self._line(f"rows = {found[1]}")
        return text[: found.start(1)] + "rows" + text[found.end(1) :]

    def _expression(self, op: Op) -> str:
        if op.gathers:
            return self._all(op.args[0])
        if not op.each:
            return op.write(self._text)[0]
        return self._over(op)

    def _over(self, op: Op) -> str:
        """A comprehension, or a loop where it writes."""
        lists: dict[Value, str] = {}
        text = op.write(lambda value: self._element(value, lists))[0]
        names, values = list(lists.values()), [self._text(value) for value in lists]
        if len(names) == 1:
            over = f"for {names[0]} in {values[0]}"
        else:
            over = f"for {', '.join(names)} in zip({', '.join(values)}, strict=True)"
        return f"{over}:\n{text}" if op.out is None else f"[{text} {over}]"

    def _element(self, value: Value, lists: dict[Value, str]) -> str:
        if value.kind != "list":
            return self._text(value)
        if value in self.inline and value.made is not None and value.made.each:
            return value.made.write(lambda v: self._element(v, lists))[0]
        if value not in lists:
            free = (
                letter for letter in ("x", "y", "z", "v", "w", "s") if letter not in lists.values()
            )
            wished = LETTERS.get(value.hint.rstrip("_0123456789"), "")
            lists[value] = wished if wished and wished not in lists.values() else next(free)
        return lists[value]

    def _text(self, value: Value) -> str:
        if value.live is not None:
            return self._live(value)
        if value in self.inline and value.made is not None:
            return self._expression(value.made)
        return value.name or self._name(value)

    def live_text(self, value: Value) -> str:
        """A live value, where its tuple is not taken apart."""
        assert value.live is not None
        key, index = value.live
        return f'group["{key}"]' if index is None else f'group["{key}"][{index}]'

    def _live(self, value: Value) -> str:
        assert value.live is not None
        key, index = value.live
        if index is None:
            return f'group["{key}"]'
        names = self.unpacked.get(key)
        return f'group["{key}"][{index}]' if names is None else names[index]

    def _all(self, value: Value) -> str:
        """The lists of all groups as one."""
        if value.made is not None and value.made.repeats:
            return self._all_inputs(value.made)
        letter = "k" if value.hint == "layer" else "x"
        return f"[{letter} for some in all_{value.name} for {letter} in some]"

    def _all_inputs(self, op: Op) -> str:
        """A list that loops begin with, of all groups as one."""
        if op.context.flags is None:
            if op.takes == "layer":
                return "[k for group in groups for k in _layers(group)]"
            part = "0" if op.takes == "params" else "1"
            letter = LETTERS[op.takes]
            return f"[{letter} for group in groups for {letter} in _tensors(group)[{part}]]"
        return "\0"

    def _largest(self, op: Op) -> Value | None:
        """The expression inside an operation that becomes a line: the shortest that does."""
        inner = sorted(self._inside(op), key=lambda v: len(self._text(v)))
        over = len(self._statement(op)) - WIDTH + len(INDENT) * self.indent
        return next(
            (v for v in inner if len(self._text(v)) - 6 > over), inner[-1] if inner else None
        )

    def _inside(self, op: Op) -> Iterator[Value]:
        for value in op.operands():
            if value in self.inline and value.made is not None:
                yield value
                yield from self._inside(value.made)

    # ------------------------------------------------------------------ what a loop begins with

    def _leaves(self, op: Op) -> Iterator[Value]:
        for value in op.operands():
            if value.made is not None and value.made.repeats:
                yield value
            elif value in self.inline and value.made is not None:
                yield from self._leaves(value.made)

    def _input(self, value: Value) -> None:
        """The statement of a list that loops begin with, once in each."""
        op = value.made
        assert op is not None
        if op in self.ready or self.phase % 2 == 0:
            return
        self.ready.add(op)
        name = self._name(value)
        if op.takes in ("params", "grads") and op.context.flags is None:
            if self.joint and "tensors" not in self.ready:
                self.ready.add("tensors")
                some = [self._of(takes, Context()) for takes in ("params", "grads")]
                self._line(f"{', '.join([self._name(v) for v in some])} = _tensors(group)")
            return
        outer = op.context.outer
        if op.takes in ("params", "grads", "layer") and outer is not None:
            whole = self._of(op.takes, outer)
            assert op.context.flags is not None
            self._input(whole)
            self._input(op.context.flags)
            self._line(f"{name} = _chosen({whole.name}, {op.context.flags.name})")
            return
        if op.takes == "layer":
            self._line(f"{name} = _layers(group)")
            return
        if op.takes == "flags":
            self._line(f"{name} = {self._among(op.context, op.write(self._text)[0])}")
        elif op.takes == "state":
            params = self._of("params", op.context)
            self._input(params)
            key = op.write(self._text)[0]
            number = list(self.state).index(op.context)
            held = "state" if not number else f"state_{number + 1}"
            if held not in self.ready:
                self.ready.add(held)
                method = "_state" if not number else f"_state_{number + 1}"
                self._line(f"{held} = [self.{method}(p) for p in {params.name}]")
            line = f'{name} = [s["{key}"] for s in {held}]'
            if len(line) > WIDTH - len(INDENT) * self.indent:
                self._line(f'key = "{key}"')
                line = f"{name} = [s[key] for s in {held}]"
            self._line(line)

    def _among(self, context: Context, flags: str) -> str:
        """Flags of all parameters of a group, as those of the parameters in a context."""
        if context.flags is None or context.outer is None:
            return flags
        self._input(context.flags)
        return f"_chosen({self._among(context.outer, flags)}, {context.flags.name})"

    def _of(self, takes: str, context: Context) -> Value:
        for op in self.inputs:
            if op.takes == takes and op.context == context and op.out is not None:
                return op.out
        made = Value("list", hint=takes, context=context)
        made.made = Op(lambda n: ("", ATOM), [], made, repeats=True, takes=takes, context=context)
        self.inputs.append(made.made)
        return made

    def _unpack(self, op: Op) -> None:
        """A tuple of live values gets names, where a rule names them."""
        for leaf in self._live_in(op):
            assert leaf.live is not None
            key, index = leaf.live
            if index is None or key in self.unpacked or op.joint:
                continue
            names = self.tuples.get(key)
            if names is None:
                continue
            taken = set(names) - {"_"}
            old = {k: row for k, row in self.unpacked.items() if taken.isdisjoint(row)}
            self.unpacked = {**old, key: names}
            self._line(f'{", ".join(names)} = group["{key}"]')

    def _live_in(self, op: Op) -> Iterator[Value]:
        for value in op.args:
            if value.live is not None:
                yield value
            elif (value.numeric or value in self.inline) and value.made is not None:
                yield from self._live_in(value.made)

    # ------------------------------------------------------------------ names, comments

    def _name(self, value: Value, fresh: bool = False) -> str:
        """The name of a value; a fresh one is of no value before."""
        if value.name:
            return value.name
        base = value.hint or {"list": "xs", "tensor": "n"}.get(value.kind, "xs")
        if value.made is not None and value.made.takes == "state" and base == "state":
            base = "kept"
        kind = value.elements if value.kind == "list" else value.kind
        name, count = base, 1
        each = value.made is not None and value.made.each
        while not self._free(name, kind, each) or (fresh and name in self.names):
            count += 1
            name = f"{base}_{count}"
        value.name, self.names[name] = name, value
        self.types.setdefault(name, kind)
        return name

    def _free(self, name: str, kind: str, each: bool) -> bool:
        if name in TAKEN:
            return False
        held = self.names.get(name)
        if held is None:
            return True
        adapts = each and self.types[name] == "tuple" and kind == "list"
        if self.types[name] != kind and not adapts:
            return False
        if held in self.crossing or held.made is None or held.made.repeats:
            return False
        if held.made.phase != self.phase:  # it may be read in another round of this loop
            return max([op.phase for op in self._users(held)], default=0) < self.phase
        users = [self.ops.index(op) for op in self._users(held)]
        return max(users, default=-1) <= self.at

    def _users(self, value: Value) -> Iterator[Op]:
        """The statements that read a value."""
        for op in self.readers.get(value, []):
            if op.out in self.inline:
                assert op.out is not None
                yield from self._users(op.out)
            else:
                yield op

    def _comment(self, op: Op) -> None:
        if op.link and op.link != getattr(self, "_linked", ""):
            self._linked = op.link
            self.lines += [f"{INDENT * self.indent}# {line}" for line in self.about[op.link]]

    def _line(self, text: str) -> None:
        self._last_loop = None
        self.lines.append(INDENT * self.indent + text)


def _double(text: str) -> str:
    """Python with its strings in double quotes; none of ours has a quote in it."""
    return text.replace("'", '"')
