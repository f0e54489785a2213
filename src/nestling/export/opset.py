"""The lowest ONNX opset and IR version in which a graph says what it says: older engines read it then.

In: an ONNX model. Out: the same model, declared as old as its operators allow. An operator may be read as an older one where that
has all the inputs and attributes that the node gives, and the same defaults for those it does not: what came later are types
and options that nobody uses. Runs nothing.
"""

import onnx
from onnx import defs, helper

LEAST = 13  # before it, 8 bits have no scale per channel, and Softmax and its like another meaning
LATER = {  # values of attributes that say something else, or nothing, before these opsets
    ("AveragePool", "ceil_mode", 1): 19,
    ("Pad", "mode", b"wrap"): 19,
}


def declare_oldest(model: onnx.ModelProto) -> None:
    """Lower what the model declares to need; one with graphs or functions of its own inside stays as it is."""
    nodes, domains = model.graph.node, [each.domain for each in model.opset_import]
    inside = any(part.type in (part.GRAPH, part.GRAPHS) for node in nodes for part in node.attribute)
    if domains != [""] or model.functions or inside:
        return
    [ours] = model.opset_import
    ours.version = max((oldest(node, ours.version) for node in nodes), default=LEAST)
    model.ir_version = helper.find_min_ir_version_for(model.opset_import)


def oldest(node: onnx.NodeProto, opset: int) -> int:
    """The first opset from LEAST in which this node means what it means in this one."""
    said = [(node.op_type, part.name, helper.get_attribute_value(part)) for part in node.attribute]
    least = max([LEAST, *(since for what, since in LATER.items() if what in said)])
    now = defs.get_schema(node.op_type, opset)
    while now.since_version > least:
        try:
            before = defs.get_schema(node.op_type, now.since_version - 1)
        except defs.SchemaError:
            break
        if not means_the_same(node, now, before):
            break
        now = before
    return max(least, now.since_version)


def means_the_same(node: onnx.NodeProto, now: defs.OpSchema, before: defs.OpSchema) -> bool:
    """Whether an older operator has all that the node gives, and the same defaults for what it does not."""
    for given, ends, older in ((node.input, now.inputs, before.inputs), (node.output, now.outputs, before.outputs)):
        names = [end.name for end in ends][: len(given)]
        if names != [end.name for end in older][: len(names)]:
            return False
    given = {part.name for part in node.attribute}
    others = (set(now.attributes) & set(before.attributes)) - given
    known = given <= set(before.attributes) and not (set(before.attributes) - set(now.attributes))
    return known and all(now.attributes[name].default_value == before.attributes[name].default_value for name in others)
