"""Jinja's compiler, whose code counts what it does against a `Budget`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.runtime import Context

from paged_kv.serve.chat.template_limits import Budget

_CALLED = ("tick", "made", "text", "checked", "within", "concat", "str_join", "markup_join")
_ADDED = 8
"""Sums of so many texts are counted once."""


class LimitedContext(Context):
    """A template's variables, with the budget of their rendering."""

    budget: Budget

    def derived(self, locals: dict[str, Any] | None = None) -> LimitedContext:  # noqa: A002
        """The same with further variables."""
        context = super().derived(locals)
        assert isinstance(context, LimitedContext)
        context.budget = self.budget
        return context


class LimitedCode(CodeGenerator):
    """Writes Python of a template.

    Each iteration counts as one operation and its statements; a call or filter counts itself. Sums and slices
    are counted when they are made, texts before they are joined, and values before they are written or compared.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._bodies: dict[int, int] = {}
        self._tests: set[int] = set()
        self._is_sum = False
        self._finalize = self._FinalizeInfo(None, "text(")  # and nothing is computed before the template runs

    def write_commons(self) -> None:
        """Names what the code calls, in each function that others lie in."""
        super().write_commons()
        self.writeline("budget = context.budget")
        for name in _CALLED:
            self.writeline(f"{name} = budget.{name}")

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802
        self._bodies[id(node.body)] = 1 + _statements(node.body)
        if node.test is not None:
            self._tests.add(id(node.test))
        super().visit_For(node, frame)

    def blockvisit(self, nodes: Sequence[nodes.Node], frame: Frame) -> None:
        if id(nodes) in self._bodies:
            self.writeline(f"tick({self._bodies[id(nodes)]})")
        super().blockvisit(nodes, frame)

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        """Writes a node; the condition of a loop counts, as the loop's body does."""
        is_test = id(node) in self._tests
        self.write("(tick() or " if is_test else "")
        super().visit(node, *args, **kwargs)
        self.write(")" if is_test else "")

    def visit_Add(self, node: nodes.Add, frame: Frame) -> None:  # noqa: N802
        is_part = self._is_sum
        if not is_part:
            self.write("made(")
            self._is_sum = _added(node) <= _ADDED
        self.write("(")
        for place, side in (("", node.left), (" + ", node.right)):
            self.write(place)
            outer, self._is_sum = self._is_sum, self._is_sum and isinstance(side, nodes.Add)
            self.visit(side, frame)
            self._is_sum = outer
        self.write(")")
        if not is_part:
            self._is_sum = False
            self.write(")")

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: CodeGenerator._FinalizeInfo) -> None:
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super()._output_child_pre(node, frame, finalize)
        else:
            self.write("text(")
        # What is written is counted where it arrives.
        self._is_sum = isinstance(node, nodes.Add) and _added(node) <= _ADDED

    def _output_child_post(self, node: nodes.Expr, frame: Frame, finalize: CodeGenerator._FinalizeInfo) -> None:
        self._is_sum = False
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super()._output_child_post(node, frame, finalize)
        else:
            self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        is_slice = isinstance(node.arg, nodes.Slice)
        self.write("made(" if is_slice else "")
        super().visit_Getitem(node, frame)
        self.write(")" if is_slice else "")

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        is_value = node.ctx == "load" and not _is_constant(node)
        self.write("made(" if is_value else "")
        super().visit_Tuple(node, frame)
        self.write(")" if is_value else "")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        self.write("made(")
        super().visit_Dict(node, frame)
        self.write(")")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802
        last = node.ops[-1]
        is_sought = last.op in ("in", "notin")
        ends = [last.expr] if is_sought else [node.expr, last.expr]
        if len(node.ops) == 1 and any(map(_is_constant, ends)):  # as long as the constant at most
            super().visit_Compare(node, frame)
            return
        self.write("(")
        self._operand("checked", node.expr, frame)
        for each in node.ops:
            self.write(f" {operators[each.op]} ")
            self._operand("within" if each.op in ("in", "notin") else "checked", each.expr, frame)
        self.write(")")

    def _operand(self, check: str, node: nodes.Expr, frame: Frame) -> None:
        is_constant = _is_constant(node)
        self.write("" if is_constant else f"{check}(")
        self.visit(node, frame)
        self.write("" if is_constant else ")")


def _statements(body: Sequence[nodes.Node]) -> int:
    """Statements and pieces of text in the body of a loop, without those of the loops in it."""
    total, left = 0, list(body)
    while left:
        node = left.pop()
        if isinstance(node, nodes.For):
            continue
        if isinstance(node, nodes.Output):
            total += len(node.nodes)
        elif isinstance(node, nodes.Stmt):
            total += 1
            left += node.iter_child_nodes()
    return total


def _added(node: nodes.Node) -> int:
    """The number of values that a sum adds."""
    total, left = 0, [node]
    while left:
        each = left.pop()
        if isinstance(each, nodes.Add):
            left += (each.left, each.right)
        else:
            total += 1
    return total


def _is_constant(node: nodes.Expr) -> bool:
    """Return whether a node is a constant, or a list of them."""
    if isinstance(node, nodes.Tuple | nodes.List):
        return all(isinstance(each, nodes.Const) for each in node.items)
    return isinstance(node, nodes.Const)
