"""Make the graph of a cut model from that of another cut of the same model, by weights and widths, without a trace."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .runtimes.graphs import add_constant

# Largest number of elements of an integer constant that is read as numbers, such as the shape of a Reshape.
NUMBERS = 64
TEMPLATES = 3  # how many graphs with different operators are remembered

Place = tuple[str, int, Any]  # what stands there, the number of the node, and the attribute, input or output of it
Shapes = dict[Hashable, tuple[int, ...]]  # of parameters by name, and of weights of the graph by ("graph", name)
Rule = tuple[Hashable, int]  # the weight, a key of `Shapes`, and the axis to whose width a number is proportional
Piece = tuple[str, bool]  # a parameter as a matrix (a vector is one row), and whether it is transposed


class Traces:
    """Traced graphs of some cuts of a model, from which graphs of further cuts are made without a trace.

    Two traced graphs that differ only in widths show how their numbers follow from widths. Both must have the same
    operators, every weight must be made of parameters, and every number that differs must be proportional to a width of
    weights nearby. A graph that is made in this way is not checked here: the caller compares it with torch.
    """

    def __init__(self) -> None:
        self._templates: dict[Hashable, list[_Template]] = {}

    def add(self, key: Hashable, model: torch.nn.Module, program: Any) -> None:
        """Learn from the traced graph of a model; graphs are made of those that were added by the same `key`."""
        tensors = _tensors(model)
        templates = self._templates.setdefault((key, *tensors), [])
        learned = any(template.learn(program, tensors) for template in templates)
        if not learned and len(templates) < TEMPLATES:
            templates.append(_Template(program, tensors))

    def resized(self, key: Hashable, model: torch.nn.Module) -> Any:
        """Return the graph of a model as an `onnx_ir.Model`; None if it does not follow from the traced ones."""
        tensors = _tensors(model)
        made = (template.resized(tensors) for template in self._templates.get((key, *tensors), ()))
        return next((program for program in made if program is not None), None)


class _Template:
    """A traced graph without weights: which parameters these are made of, and how its sizes follow from theirs."""

    def __init__(self, program: Any, tensors: Mapping[str, np.ndarray]):
        self._program = _with_separate_shapes(program)
        matrices = _by_rows(tensors)
        initializers = self._program.graph.initializers
        self._pieces: dict[str, list[Piece]] = {}  # by name of the graph's weight, from left to right
        self._shapes = _shapes(tensors, {})
        for name, value in initializers.items():
            pieces = _pieces(value, matrices)
            if pieces:
                self._pieces[name] = pieces
                self._shapes["graph", name] = tuple(value.shape)
                value.const_value = None
        used = {name for pieces in self._pieces.values() for name, _ in pieces}
        self._unused = {name: array for name, array in tensors.items() if name not in used}
        self._nodes, inputs = list(self._program.graph.all_nodes()), dict(_inputs(self._program))
        self._inputs = inputs.keys()  # (number of the node, index of its input)
        self._weights = {key: value.name for key, value in inputs.items() if value.name in self._pieces}
        self._contents = dict(_contents(self._program, self._weights))
        self._rules: dict[tuple[Place, int], Rule] = {}  # by place and position there
        self._resized: set[str] = set()  # parameters whose shapes differed in a graph that was learned from

    def learn(self, program: Any, tensors: Mapping[str, np.ndarray]) -> bool:
        """Find rules for what differs in the graph of another cut; if one is missing, keep none and return False."""
        program = _with_separate_shapes(program)
        weights, inputs = self._weights_of(tensors), dict(_inputs(program))
        contents = dict(_contents(program, self._weights))
        if weights is None or contents.keys() != self._contents.keys() or inputs.keys() != self._inputs:
            return False
        for key, name in self._weights.items():
            constant = inputs[key].const_value
            if constant is None or not np.array_equal(constant.numpy(), weights[name]):
                return False
        shapes = _shapes(tensors, weights)
        rules: dict[tuple[Place, int], Rule] = {}
        for place, before in self._contents.items():
            after = contents[place]
            if len(before) != len(after):
                return False
            for position, (old, new) in enumerate(zip(before, after, strict=True)):
                rule = self._rules.get((place, position))  # from a graph that was learned before
                expected = old if rule is None else self._predicted(old, rule, shapes)
                if new == expected:
                    continue
                are_numbers = isinstance(old, int) and isinstance(new, int)
                rule = self._explanation(place, old, new, shapes) if are_numbers else None
                if rule is None:
                    return False
                rules[place, position] = rule
        self._rules |= rules
        self._resized |= {name for name, array in tensors.items() if array.shape != self._shapes[name]}
        return True

    def resized(self, tensors: Mapping[str, np.ndarray]) -> Any:
        """Return the graph with the weights and widths of a cut model; None if they do not follow from others."""
        different = {name for name, array in tensors.items() if array.shape != self._shapes[name]}
        if not different <= self._resized:
            return None
        # A parameter that is no weight of the graph may be folded into a constant, so it must be as it was.
        same_unused = all(np.array_equal(tensors[name], array) for name, array in self._unused.items())
        weights = self._weights_of(tensors) if same_unused else None
        if weights is None:
            return None
        shapes = _shapes(tensors, weights)
        contents: dict[Place, list[Any]] = {}
        for (place, position), rule in self._rules.items():
            numbers = contents.setdefault(place, list(self._contents[place]))
            numbers[position] = self._predicted(numbers[position], rule, shapes)
            if numbers[position] is None:
                return None
        program = self._program.clone()
        _fill(program, weights, contents)
        _merge_shapes(program)
        return program

    def _weights_of(self, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray] | None:
        """Return the weights of the graph of a cut model, by name; None if its parameters do not fit together."""
        weights = {}
        for name, pieces in self._pieces.items():
            columns = [_matrix(tensors[parameter], transposed) for parameter, transposed in pieces]
            if len({len(array) for array in columns}) > 1:
                return None
            joined = columns[0] if len(columns) == 1 else np.concatenate(columns, axis=1)
            shape = self._shapes["graph", name]
            if len(shape) != 2:  # a vector, or a tensor that was read as one: its width may change on a single axis
                wide = [axis for axis, size in enumerate(shape) if size > 1]
                if joined.size != np.prod(shape) and len(wide) > 1:
                    return None
                joined = joined.reshape([-1 if [axis] == wide else size for axis, size in enumerate(shape)])
            weights[name] = np.ascontiguousarray(joined)
        return weights

    def _predicted(self, number: int, rule: Rule, shapes: Shapes) -> int | None:
        """Return a number of the graph at other shapes of the weights, by its rule; None if it is not whole."""
        name, axis = rule
        predicted, rest = divmod(number * shapes[name][axis], self._shapes[name][axis])
        return None if rest else predicted

    def _explanation(self, place: Place, old: int, new: int, shapes: Shapes) -> Rule | None:
        """Return the name and axis of the nearest weight whose width changed by the same factor as a number; else None.

        The search visits the number's node, the nodes computed from it, and the nodes that any of these are computed
        from. It does not visit other readers of the last, because all layers read the attention mask and the states.
        """
        kind, number, _ = place
        starts = self._program.graph.inputs[number].consumers() if kind == "input" else [self._nodes[number]]
        queue = deque((node, True) for node in starts)  # a node, and whether to visit those that read its outputs
        seen = {*queue}
        while queue:
            node, follow_outputs = queue.popleft()
            inputs = [value for value in node.inputs if value is not None]
            for weight in (value.name for value in inputs if value.name in self._pieces):
                for name in (("graph", weight), *(parameter for parameter, _ in self._pieces[weight])):
                    for axis, (was, now) in enumerate(zip(self._shapes[name], shapes[name], strict=True)):
                        if was != now and old * now == new * was:
                            return name, axis
            neighbours = [(value.producer(), False) for value in inputs if value.producer() is not None]
            if follow_outputs:
                neighbours += [(user, True) for value in node.outputs for user in value.consumers()]
            queue.extend(step for step in dict.fromkeys(neighbours) if step not in seen)
            seen.update(neighbours)
        return None


def _tensors(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """Return the parameters and buffers of a model as arrays, by name."""
    return {name: tensor.detach().numpy() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def _shapes(tensors: Mapping[str, np.ndarray], weights: Mapping[str, np.ndarray]) -> Shapes:
    """Return the shapes of parameters and of a graph's weights."""
    shapes: Shapes = {name: array.shape for name, array in tensors.items()}
    return shapes | {("graph", name): array.shape for name, array in weights.items()}


def _matrix(array: np.ndarray, transposed: bool = False) -> np.ndarray:
    """Return an array as a matrix, or its transpose; one of any other number of axes than two is a single row."""
    matrix = array if array.ndim == 2 else array.reshape(1, -1)
    return matrix.T if transposed else matrix


def _by_rows(tensors: Mapping[str, np.ndarray]) -> dict[int, list[tuple[Piece, np.ndarray]]]:
    """Return number of rows -> parameters as matrices, those of two axes also transposed."""
    matrices: dict[int, list[tuple[Piece, np.ndarray]]] = {}
    for name, array in tensors.items():
        for transposed in (False, True) if array.ndim == 2 else (False,):
            matrix = _matrix(array, transposed)
            matrices.setdefault(len(matrix), []).append(((name, transposed), matrix))
    return matrices


def _pieces(value: Any, matrices: Mapping[int, list[tuple[Piece, np.ndarray]]]) -> list[Piece]:
    """Return the parameters that a constant is made of, from left to right; none if that is unclear."""
    pieces: list[Piece] = []
    constant = value.const_value
    # A single number is not taken for a parameter, because a zero of a bias may equal it by chance.
    if constant is None or constant.size == 1 or not constant.dtype.is_floating_point():
        return pieces
    left = _matrix(constant.numpy())
    while left.shape[1]:
        found = [(piece, matrix) for piece, matrix in matrices.get(len(left), ()) if _begins_with(left, matrix)]
        found = [(piece, matrix) for piece, matrix in found if piece[0] == value.name] or found
        if len({name for (name, _), _ in found}) != 1:
            return []
        piece, matrix = found[0]
        pieces.append(piece)
        left = left[:, matrix.shape[1] :]
    return pieces


def _begins_with(array: np.ndarray, matrix: np.ndarray) -> bool:
    """Return whether the first columns of an array are those of a matrix of as many rows."""
    first = array[:, : matrix.shape[1]]
    # The first row alone tells most matrices apart.
    return matrix.dtype == array.dtype and np.array_equal(first[:1], matrix[:1]) and np.array_equal(first, matrix)


def _with_separate_shapes(program: Any) -> Any:
    """Return a copy in which no two nodes read the same computed shape, if it may have widths in it.

    The exporter merges equal computations, so that layers of equal widths share one; `_merge_shapes` undoes the copies.
    """
    import onnx_ir

    copied = program.clone()
    for node in reversed(list(copied.graph.all_nodes())):
        if not _is_shape_with_constants(node):
            continue
        for user, index in [*node.outputs[0].uses()]:
            copy = onnx_ir.Node(node.domain, node.op_type, node.inputs, [*node.attributes.values()], name=node.name)
            (old,), (new,) = node.outputs, copy.outputs
            new.name, new.type, new.shape = old.name, old.type, old.shape.copy()
            user.graph.insert_before(user, copy)
            user.replace_input_with(index, new)
        node.graph.remove(node, safe=True)
    return copied


def _is_shape_with_constants(node: Any) -> bool:
    """Return whether a node computes a shape from constants, directly or by other nodes; indices do not count."""
    output = node.outputs[0]
    if output.dtype is None or output.dtype.name != "INT64" or output.is_graph_output() or len(node.outputs) > 1:
        return False
    if output.shape is None or len(output.shape) > 1:
        return False
    return any(
        (value.const_value is not None and node.op_type == "Concat")
        or (value.producer() is not None and _is_shape_with_constants(value.producer()))
        for value in node.inputs
        if value is not None
    )


def _merge_shapes(program: Any) -> None:
    """Merge equal shapes that `_with_separate_shapes` has copied, in place, and give all others names of their own."""
    from onnx_ir.passes import common

    common.DeduplicateInitializersPass(NUMBERS)(program)
    common.CommonSubexpressionEliminationPass()(program)
    common.RemoveUnusedNodesPass()(program)
    common.NameFixPass()(program)


def _inputs(program: Any) -> Iterator[tuple[tuple[int, int], Any]]:
    """Yield the inputs of all nodes of a graph, after the number of the node and the index of the input."""
    for number, node in enumerate(program.graph.all_nodes()):
        for index, value in enumerate(node.inputs):
            if value is not None:
                yield (number, index), value


def _contents(program: Any, weights: Collection[tuple[int, int]]) -> Iterator[tuple[Place, tuple[Any, ...]]]:
    """Yield all that a graph consists of but its weights, by place: integers may be widths, everything else is text."""
    nodes = list(program.graph.all_nodes())
    numbers = {node: str(number) for number, node in enumerate(nodes)}
    for number, value in enumerate(program.graph.inputs):
        yield ("input", number, 0), _dims(value)
    yield ("outputs", 0, 0), tuple(value.name for value in program.graph.outputs)
    for number, node in enumerate(nodes):
        yield ("operator", number, 0), (node.domain, node.op_type)
        for name, attribute in node.attributes.items():
            yield ("attribute", number, name), _values(attribute)
        for index, value in enumerate(node.inputs):
            if value is None or (number, index) in weights:
                continue
            if (producer := value.producer()) is not None:
                yield ("wire", number, index), (numbers[producer], str(value.index()))
            elif value.const_value is not None:
                yield ("constant", number, index), _numbers_in(value.const_value)
            elif node.op_type == "Shape":  # the exporter reads an axis from any input that has it: only the axis counts
                read = slice(node.attributes.get_int("start", 0), node.attributes.get_int("end", None))
                yield ("wire", number, index), tuple(str(dim) for dim in _dims(value)[read])
            else:
                yield ("wire", number, index), (value.name,)
        for index, value in enumerate(node.outputs):
            yield ("shape", number, index), _dims(value)


def _dims(value: Any) -> tuple[Any, ...]:
    """Return a value's known widths as integers, and the names of its others."""
    return tuple(dim if isinstance(dim, int) else str(dim) for dim in value.shape or ())


def _values(attribute: Any) -> tuple[Any, ...]:
    """Return the integers of an attribute, or else its text."""
    kind = attribute.type.name
    if kind in ("GRAPH", "GRAPHS"):  # its nodes are among those of the graph
        return ()
    if kind == "TENSOR":
        return _numbers_in(attribute.value)
    if kind in ("INT", "INTS"):
        return (attribute.value,) if kind == "INT" else tuple(attribute.value)
    return (str(attribute.value),)


def _numbers_in(tensor: Any) -> tuple[Any, ...]:
    """Return the elements of a small integer tensor, or else its dtype, shape and hash."""
    array = tensor.numpy()
    if array.dtype.kind == "i" and array.size <= NUMBERS:
        return tuple(array.ravel().tolist())
    return str(array.dtype), str(array.shape), hashlib.blake2b(array.tobytes()).hexdigest()


def _fill(program: Any, weights: Mapping[str, np.ndarray], contents: Mapping[Place, Sequence[Any]]) -> None:
    """Put weights by name, and contents by place, as `_contents` yields them, into a graph in place."""
    import onnx_ir

    graph, nodes = program.graph, list(program.graph.all_nodes())
    constants: dict[Any, Any] = {}
    for name, array in weights.items():
        value = graph.initializers[name]
        value.const_value, value.shape = onnx_ir.tensor(array), onnx_ir.Shape(array.shape)
    for (kind, number, index), numbers in contents.items():
        if kind in ("input", "shape"):
            value = graph.inputs[number] if kind == "input" else nodes[number].outputs[index]
            pairs = zip(value.shape, numbers, strict=True)  # a name keeps its axis
            value.shape = onnx_ir.Shape([dim if isinstance(size, str) else size for dim, size in pairs])
        elif kind == "attribute":
            old = nodes[number].attributes[index]
            new: Any = numbers[0] if old.type.name == "INT" else numbers
            if old.type.name == "TENSOR":
                new = onnx_ir.tensor(_array(old.value, numbers))
            nodes[number].attributes[index] = onnx_ir.Attr(index, old.type, new)
        else:
            old = nodes[number].inputs[index]
            array = _array(old.const_value, numbers)
            key = array.dtype, array.shape, *numbers
            if key not in constants:
                constants[key] = add_constant(graph, f"{old.name}_resized_{len(constants)}", array)
            nodes[number].replace_input_with(index, constants[key])


def _array(tensor: Any, numbers: Sequence[int]) -> np.ndarray:
    """Return numbers as an array that has the dtype and shape of an `onnx_ir` tensor."""
    like = tensor.numpy()
    return np.array(numbers, like.dtype).reshape(like.shape)
