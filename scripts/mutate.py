"""Changes the terms of our rules one at a time, and counts the changes that no identity notices.

    python scripts/mutate.py              # every term that an identity runs through
    python scripts/mutate.py adamw lamb   # those of two identities
    python scripts/mutate.py sign.py      # those of a file

Each operator, number, call and branch in the methods of a rule that runs during an identity is
changed in place: plus to minus, a number to one more, a call to what it is called on. Then the
identities that pass through that line run again, and one must fail. What survives is printed: a
term that is held by nothing.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from scripts.detection import changed  # noqa: E402
from tests.identities.identity import Identity, apart, load  # noqa: E402

PACKAGE = ROOT / "torchzero_clip"
MUTATED_PACKAGES = (PACKAGE / "modules", PACKAGE / "published")

OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult,
    ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
}  # fmt: skip
INVERSE = {"mul": "div", "div": "mul", "add": "sub", "sub": "add", "maximum": "minimum"}
INVERSE |= {name + "_": other + "_" for name, other in INVERSE.items()}
INVERSE |= {"minimum": "maximum", "minimum_": "maximum_"}
KEPT = {"stack", "append", "items", "values", "super", "to", "borrow", "clone", "own", "dim"}
"""Calls that compute nothing: what they are called on is the same numbers."""


@dataclass(frozen=True)
class Mutation:
    """One change of one function, and the lines where it stands."""

    function: FunctionType
    code: CodeType
    lines: range
    said: str
    change: str

    def __str__(self) -> str:
        file = Path(self.code.co_filename).relative_to(PACKAGE)
        return f"{file}:{self.lines[0]} {self.function.__name__}: {self.said}  → {self.change}"

    @property
    def no_term(self) -> str | None:
        """The entry of NOT_TERMS that it is of."""
        file = Path(self.code.co_filename)
        line = file.read_text().splitlines()[self.lines[0] - 1].strip()
        words = [f"{file.name} {self.function.__name__}: {text}" for text in (self.said, line)]
        for key in NOT_TERMS:
            if key in self.said or any(text.startswith(key) for text in words):
                return key
        return None

    @contextmanager
    def applied(self) -> Iterator[None]:
        before = self.function.__code__
        self.function.__code__ = self.code
        try:
            yield
        finally:
            self.function.__code__ = before


# ---------------------------------------------------------------------- what is changed


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Other nodes for this one, each with a word about it."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield "another operator", changed(node, op=OPERATORS[type(node.op)]())
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield "without its sign", node.operand
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OPERATORS:
        first = OPERATORS[type(node.ops[0])]()
        yield "the other way round", changed(node, ops=[first, *node.ops[1:]])
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield "one more", ast.Constant(node.value + 1)
    if isinstance(node, (ast.If, ast.IfExp)):
        yield "the other branch", changed(node, test=ast.UnaryOp(ast.Not(), node.test))
    if isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Store) and len(node.elts) == 2:
        yield "in the other order", changed(node, elts=node.elts[::-1])
    if isinstance(node, ast.Call):
        yield from changed_calls(node)


def changed_calls(node: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    for i, keyword in enumerate(node.keywords):
        if keyword.arg in ("alpha", "value", "min", "max"):
            fewer = node.keywords[:i] + node.keywords[i + 1 :]
            yield f"without {keyword.arg}", changed(node, keywords=fewer)
    if name == "where" and len(node.args) == 3:
        yield "branches exchanged", changed(node, args=[node.args[0], *node.args[:0:-1]])
    if name == "Chain":
        for i in range(len(node.args)):
            fewer = node.args[:i] + node.args[i + 1 :]
            yield f"without {ast.unparse(node.args[i])}", changed(node, args=fewer)
        for i in range(len(node.args) - 1):
            turned = [*node.args[:i], node.args[i + 1], node.args[i], *node.args[i + 2 :]]
            yield f"link {i + 1} after the next", changed(node, args=turned)
    if isinstance(node.func, ast.Attribute) and not called_on_name(node.func, "torch", "math"):
        if name in INVERSE:
            yield "the inverse", changed(node, func=changed(node.func, attr=INVERSE[name]))
        if name not in KEPT and not called_on_name(node.func, "self") and arithmetic(node.func):
            yield "not called", node.func.value
    if name.startswith("lerp") and len(node.args) == 2:
        rest = ast.BinOp(ast.Constant(1), ast.Sub(), node.args[1])
        yield "the other weight", changed(node, args=[node.args[0], rest])


def called_on_name(function: ast.Attribute, *names: str) -> bool:
    return isinstance(function.value, ast.Name) and function.value.id in names


def arithmetic(function: ast.Attribute) -> bool:
    """Whether a method is one of tensors: all others lead to errors, which prove nothing."""
    return hasattr(torch.Tensor, function.attr)


class Change(ast.NodeTransformer):
    """Puts one node in the place of another."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        if node is self.old:
            return ast.fix_missing_locations(ast.copy_location(self.new, node))
        return self.generic_visit(node)


def mutations_of(function: FunctionType) -> Iterator[Mutation]:
    """All changes of a function that leave its cells as they are."""
    file = Path(function.__code__.co_filename)
    source = definition(file, function.__code__.co_firstlineno)
    for i, part in enumerate(ast.walk(source)):
        for j, (what, _) in enumerate(changes(part)):
            fresh = copy.deepcopy(source)
            old = list(ast.walk(fresh))[i]
            new = list(changes(old))[j][1]
            code = compiled(Change(old, new).visit(fresh), function)
            lines = range(part.lineno, part.end_lineno + 1)  # type: ignore[attr-defined]
            yield Mutation(function, code, lines, ast.unparse(part).split("\n")[0], what)


@functools.cache
def definition(file: Path, first: int) -> ast.FunctionDef:
    """The function that begins at a line, without decorators, types and docstring."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef) and first in (node.lineno, *decorators(node)):
            node.decorator_list, node.returns = [], None
            node.args.defaults, node.args.kw_defaults = [], []
            for argument in ast.walk(node.args):
                if isinstance(argument, ast.arg):
                    argument.annotation = None
            if ast.get_docstring(node):
                node.body[0] = ast.copy_location(ast.Pass(), node.body[0])
            return node
    raise LookupError(f"no function begins at {file}:{first}")


def decorators(node: ast.FunctionDef) -> list[int]:
    return [decorator.lineno for decorator in node.decorator_list[:1]]


def compiled(node: ast.FunctionDef, function: FunctionType) -> CodeType:
    """The code of a changed function, as a method where it was one."""
    outer: ast.stmt = node
    if "__class__" in function.__code__.co_freevars:
        outer = ast.ClassDef("_", [], [], [node], [])
        ast.copy_location(outer, node)
    module = compile(
        ast.fix_missing_locations(ast.Module([outer], [])), function.__code__.co_filename, "exec"
    )
    (code,) = (c for c in codes(module) if c.co_name == node.name)
    assert code.co_freevars == function.__code__.co_freevars
    return code


def codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


# ---------------------------------------------------------------------- what notices it


@functools.cache
def expected(identity: Identity, dtype: torch.dtype) -> Any:
    return identity.expected(dtype)


def ways(identity: Identity) -> Iterator[tuple[torch.dtype, dict[str, Any]]]:
    """Those in which the test of an identity runs our chain."""
    for dtype in reversed(identity.rtol):  # the sharpest first
        yield dtype, {}
        if identity.compare == "parameters":
            yield dtype, {"fused": False}


def notices(identity: Identity) -> bool:
    """Whether the test of an identity fails now."""
    for dtype, options in ways(identity):
        try:
            far = apart(identity.got(dtype, **options), expected(identity, dtype))
        except Exception:
            return True
        if not far <= identity.rtol[dtype]:
            return True
    return False


Lines = dict[CodeType, set[int]]


def lines_of(identity: Identity) -> Lines:
    """The lines of our rules that run during the test of an identity."""
    seen: Lines = {}

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(tuple(map(str, MUTATED_PACKAGES))):
            return None
        seen.setdefault(frame.f_code, set()).add(frame.f_lineno)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for options in ({}, {"fused": False}):
            if identity.compare == "parameters" or not options:
                identity.got(torch.float32, **options)
    finally:
        sys.settrace(before)
    return seen


def functions() -> Iterator[FunctionType]:
    """The functions and methods of the rules and of the published names."""
    for name, module in sorted(sys.modules.items()):
        if name.startswith(("torchzero_clip.modules.", "torchzero_clip.published.")):
            for thing in vars(module).values():
                if getattr(thing, "__module__", None) == name:
                    inside = vars(thing).values() if inspect.isclass(thing) else [thing]
                    for member in inside:
                        found = member.fget if isinstance(member, property) else member
                        if isinstance(found, FunctionType) and found.__module__ == name:
                            yield found


NOT_TERMS = {
    "TIE": "how near two norms are equal, which tests/modules/test_ties.py holds",
    "ada_gc.py limit: (self.total(group) / group['abs']).clamp": "a larger limit clips nothing",
    "adaptive_rule.py init_unit: 0.0": "the first norm takes the place of the mean",
    "adaptive_rule.py observe: 1": "a warm-up of none, which has no mean to start from",
    "adaptive_rule.py observe: (count - 1).clamp": "the variance of one norm is 0 / 1",
    "quantile.py limit: -1": "the last dim is dim 1",
    "z_stat.py limit: std + self.eps": "how near a norm is to a spike",
    "z_stat.py init_unit: 0.0": "the warm-up takes its place",
    "spike_clip.py update: after.where": "what is no number never enters; official code lets it",
    "ada_clip.py limit: 0": "the bound of the first step is its own largest entry",
    "ada_clip.py apply: floor": "what becomes of an infinite entry; official code is lost then",
    "ada_gn.py limit: 1.0": "before any norm that is a number; official code is lost then",
    "trust_ratio.py limit: ratio.clamp(min": "tests/modules/test_published_rules.py has low bounds",
    "adam.py fused": "when torch's kernel runs is a question of speed",
    "graft.py scope": "tests/modules/test_published_rules.py has scopes",
    "steepest.py scope": "tests/modules/test_steepest.py has layouts",
    "layout_inside.py layout_inside": "layouts, which tests/modules/test_steepest.py has",
    "graft.py step: 0": "the link is the same for every bucket",
    "reset.py step: 0": "the step is the same in every bucket",
    "reset.py _write: if isinstance": "a new tensor is as good as a new value in the old one",
    "sign.py update: u.own().sign_().masked": "NaN stays NaN: tests/modules/contract",
    'asgd.py update: state["ax"]': "the average, which tests/modules/test_descent.py holds",
    "following.py begun: param.detach": "state asks for no gradient, and a step makes none",
    "prodigy.py init: param.detach": "state asks for no gradient, and a step makes none",
    "prodigy.py step: d / self.d0": "a unit of both sums, whose ratio is asked for",
    "prodigy.py step: 0.0": "a size of zero, before any gradient",
    "distance.py _views: 0": "the link is the same in every bucket",
    "distance.py of_model: 0": "every bucket is of the same step, whose groups it asks for",
    "schedule_free.py update: 0.0": "where all rates were 0, z is w, and any share is right",
    "cautious.py step: 2": "complex numbers are pairs",
    "cautious.py step: numbers(sizes, counts).clamp": "an empty tensor: tests/modules/contract",
    "cautious.py _agreement: pairs(u).sign()": "the product of tiny numbers would be 0",
    "heads.py row_factors": "several sections: tests/modules/test_qk_clip.py",
    "heads.py head_factors: heads.maxima.detach": "a step makes no graph",
    "heads.py head_factors: 0": "a maximum below the limit; one row per head: test_qk_clip.py",
    "heads.py head_factors: 1": "no head at all; one row per head: tests/modules/test_qk_clip.py",
    "heads.py head_factors: torch.cat": "several sections: tests/modules/test_qk_clip.py",
    "heads.py shrunk: 1": "(w - u) · 1 is the same step except for rounding",
    "max_norm.py project: 1": "what stays is the same but for rounding, as the test of MaxNorm has",
    "max_norm.py _step_to": "a weight that stays is the same except for rounding",
    "ema.py init": "a count that nothing reads",
    "momentum.py check_momentum": "of a warning",
    "ortho_grad.py step: share = torch.where": "of weights that are zero nothing is taken",
    "ortho_grad.py step: ratio = torch.where": "of rounding: tests/modules/test_descent.py",
    "ortho_grad.py step: 8": "how near to rounding what is left may be",
    "momentum.py update: 0": "without dampening the share is 1",
    "momentum.py fused": "when torch's kernel runs is a question of speed",
    'weight_decay.py update: share = (group["lr"]': "how near the largest lr is kept in float32",
    "normalize.py limit_is": "a warning at construction",
    "normalize.py _factor_of_shape": "of stacks, which tests/modules/test_matrices.py holds",
    "equal_rows.py step: size / root_of_rows": "Orthogonalize, which comes next, knows no size",
    "equal_rows.py step: if units.division.has_finer": "shards: tests/processes/test_layouts.py",
    "neuron_norm.py _init_named": "tests/modules/test_matrices.py has layouts",
    "neuron_norm.py step: rms + EPS": "how near a row is to zero",
    "matrix_methods.py nordion2: Chain": "NeuronNorm keeps a factor of the whole matrix",
    "scale_by_shape.py update: if": "which of two equal ways is a question of speed",
    "scale_by_shape.py _factors: if": "which of two equal ways is a question of speed",
    "scale_by_shape.py _sizes": "matrices of several shapes: tests/modules/test_matrices.py",
    "matrix_methods.py scion: 1": "an average that keeps nothing is the gradient",
    "matrix_methods.py klsoap: Chain": "official code decays after: tests/modules/test_kl_basis.py",
    "orthogonalize.py _scale: 1": "wide matrices, which tests/modules/test_matrices.py has",
    "orthogonalize.py _scale: (a, b)": "the larger of two numbers has no order",
    "orthogonalize.py _orthogonal: x.dtype": "whether a copy is needed is a question of speed",
    "batches.py in_batches": "which matrices are multiplied together is a question of speed",
    "eigenbases.py average: if not new.is_cpu": "which of two equal ways is a question of speed",
    "rows.py update_tensor: -1": "of stacks, and of what is not finite: tests/modules/test_rows.py",
    "rows.py update_tensor: 1": "of stacks, and of what is not finite: tests/modules/test_rows.py",
    "rows.py _transformed: lines.unbind": "a stack of small matrices is a list of them",
    "rows.py _transformed: 0": "a step passes one matrix as a stack of one",
    "shampoo.py refresh_matrix": "of stacks, which tests/modules/test_shampoo.py holds",
    "shampoo.py update_tensor": "a factor, which Graft leaves out: tests/modules/test_shampoo.py",
    "eigenbases.py gram: rows = x.shape": "of large matrices, which tests/modules/test_soap.py has",
    "eigenbases.py gram: if not x.is_cpu": "which of two equal ways is a question of speed",
    "eigenbases.py eigenvectors: -1": "the matrix is square",
    "eigenbases.py eigenvectors: 1": "the matrix is square",
    "eigenbases.py eigenvectors: matrix + tiny": "how near an eigenvalue is to zero",
    "eigenbases.py orthonormal: if": "which of two equal ways is a question of speed",
    "eigenbases.py orthonormal: torch.linalg.qr(x).Q.contiguous": "where it lies, for speed",
    "eigenbases.py ordered: if len(x)": "which of two equal ways is a question of speed",
    "in_basis.py step: if self.drops": "dropped updates, which tests/modules/test_soap.py has",
    "in_basis.py step: 0": "the step is the same in every bucket",
    "inside.py check_links: 1": "which links may be inside, which tests/modules/test_soap.py has",
    "inside.py _check_inside: if": "which links may be inside: tests/modules/test_soap.py",
    "inside.py _check_state": "which links may be inside, which tests/modules/test_soap.py has",
    "kl_basis.py observe_matrix: gram(whitened)": "the scale: tests/modules/test_kl_basis.py",
    "kl_basis.py observe_matrix: max(": "how small λ may be: tests/modules/test_kl_basis.py",
    "kl_basis.py observe_matrix: 1": "how small λ may be: tests/modules/test_kl_basis.py",
    "kl_basis.py observe_matrix: 2": "how small λ may be: tests/modules/test_kl_basis.py",
    "kl_basis.py observe_matrix: values.clamp": "the same",
    "kl_basis.py observe_matrix: weights": "of stacks, which tests/modules/test_kl_basis.py has",
    "kl_basis.py _whitened: roots": "of stacks, which tests/modules/test_kl_basis.py has",
    "renewal.py _follow: if batch.stacked": "of links for some: tests/modules/test_soap.py",
    "turning.py begin: 0": "the step is the same in every bucket",
    "turning.py begin: bucket.select": "a late first gradient: tests/modules/test_soap.py",
    "hyperball.py step: 0": "a first norm from 0 to 1: tests/modules/test_published_rules.py",
    "kron.py _average: (1 - group['beta'] ** state['step']).unsqueeze": "of stacks of matrices",
    "kron.py _average: -1": "of stacks, which tests/modules/test_kron.py holds",
    "kron.py _average: 1": "of stacks, which tests/modules/test_kron.py holds",
    "lessons.py is_due": "of later steps, which tests/modules/test_kron.py holds",
    "whitening.py twice: rows, columns": "which of two equal ways is a question of speed",
    "whitening.py twice: q.mT @ q @ x if rows": "which of two equal ways is a question of speed",
    "whitening.py twice: rows < columns": "which of two equal ways is a question of speed",
    "whitening.py learned: -1": "the last dim of one matrix is dim 1",
    "whitening.py length: -1": "the last dim of one matrix is dim 1",
    "whitening.py lesson: DAMPING * size + eps": "eps, which tests/modules/test_kron.py holds",
    "whitening.py balanced: -1": "the last dim of one matrix is dim 1",
    "whitening.py balanced: q.abs()": "only the product of both factors is seen",
    "whitening.py at_least_tiny": "how near the square of all noise is to zero",
    "newton_schulz.py _is_triple": "what is no list of coefficients is an error",
    "newton_schulz.py normalized": "in two steps, for norms whose square has no place in a float",
    "newton_schulz.py newton_schulz": "which of two equal ways is a question of speed",
    "newton_schulz.py by_gram": "which of two equal ways is a question of speed",
    "newton_schulz.py _parts": "which of two equal ways is a question of speed",
}
"""What no identity can notice, and why: how the words of a change begin, or a name in them."""

SKIPPED = ("check", "__init__", "named", "links_of", "published")
"""Functions that no step passes: they check arguments, or look names up."""


def plan(identities: Sequence[Identity]) -> Iterator[tuple[Mutation, list[Identity]]]:
    """Each mutation of a line that runs, with the identities whose tests run it."""
    running = {identity.name: lines_of(identity) for identity in identities}
    for function in {f.__code__: f for f in functions()}.values():
        inner = set(codes(function.__code__))
        ran = {
            name: set().union(*(lines for code, lines in seen.items() if code in inner))
            for name, seen in running.items()
        }
        if function.__name__ in SKIPPED or not any(ran.values()):
            continue
        for mutation in mutations_of(function):
            judges = [it for it in identities if ran[it.name] & set(mutation.lines)]
            if judges:
                yield mutation, judges


def survives(mutation: Mutation, judges: Sequence[Identity]) -> bool:
    with mutation.applied():
        return not any(notices(identity) for identity in judges)


def main(names: Sequence[str]) -> int:
    warnings.simplefilter("ignore")
    known, files = load(), [name for name in names if name.endswith(".py")]
    identities = [known[name] for name in names if name not in files] or list(known.values())
    for identity in identities:
        for dtype, options in ways(identity):
            far = identity.distance(dtype, **options)
            assert far <= 1, f"{identity.name} fails without any change"
    tried, alive, excused = 0, 0, set()
    for mutation, judges in plan(identities):
        if files and Path(mutation.code.co_filename).name not in files:
            continue
        tried += 1
        if survives(mutation, judges):
            alive += mutation.no_term is None
            excused |= {mutation.no_term} - {None}
            why = NOT_TERMS.get(mutation.no_term or "", "")
            print(f"no term   {mutation}: {why}" if why else f"SURVIVES  {mutation}", flush=True)
    asked = {key for key in NOT_TERMS if not files or key.partition(" ")[0] in files}
    needless = sorted(asked - excused) if len(identities) == len(known) else []
    for entry in needless:
        print(f"NEEDLESS  {entry!r} in NOT_TERMS: nothing of it survives")
    print(f"{tried} changes, {alive} survive")
    return alive + len(needless)


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
