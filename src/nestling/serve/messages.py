"""The messages of the Open Inference Protocol's gRPC form, made from the table below: nothing is generated.

Names and field numbers are those of open_inference_grpc.proto (https://github.com/kserve/open-inference-protocol) and, for
streams, of Triton's grpc_service.proto (https://github.com/triton-inference-server/common). The descriptors are in a pool of
their own, so that a client's generated ones may live in the same process.
"""

import re
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "inference"
PARAMETERS = "map<string, InferParameter> parameters"
TENSOR = "string name = 1; string datatype = 2; repeated int64 shape = 3"
MESSAGES = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "bool live = 1",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "bool ready = 1",
    "ModelReadyRequest": "string name = 1; string version = 2",
    "ModelReadyResponse": "bool ready = 1",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "string name = 1; string version = 2; repeated string extensions = 3",
    "ModelMetadataRequest": "string name = 1; string version = 2",
    "TensorMetadata": TENSOR,
    "ModelMetadataResponse": "string name = 1; repeated string versions = 2; string platform = 3; "
    "repeated TensorMetadata inputs = 4; repeated TensorMetadata outputs = 5; map<string, string> properties = 6",
    "InferParameter": "oneof bool bool_param = 1; oneof int64 int64_param = 2; oneof string string_param = 3; "
    "oneof double double_param = 4; oneof uint64 uint64_param = 5",
    "InferTensorContents": "repeated bool bool_contents = 1; repeated int32 int_contents = 2; repeated int64 int64_contents = 3; "
    "repeated uint32 uint_contents = 4; repeated uint64 uint64_contents = 5; repeated float fp32_contents = 6; "
    "repeated double fp64_contents = 7; repeated bytes bytes_contents = 8",
    "InferInputTensor": f"{TENSOR}; {PARAMETERS} = 4; InferTensorContents contents = 5",
    "InferRequestedOutputTensor": f"string name = 1; {PARAMETERS} = 2",
    "ModelInferRequest": f"string model_name = 1; string model_version = 2; string id = 3; {PARAMETERS} = 4; "
    "repeated InferInputTensor inputs = 5; repeated InferRequestedOutputTensor outputs = 6; "
    "repeated bytes raw_input_contents = 7",
    "InferOutputTensor": f"{TENSOR}; {PARAMETERS} = 4; InferTensorContents contents = 5",
    "ModelInferResponse": f"string model_name = 1; string model_version = 2; string id = 3; {PARAMETERS} = 4; "
    "repeated InferOutputTensor outputs = 5; repeated bytes raw_output_contents = 6",
    "ModelStreamInferResponse": "string error_message = 1; ModelInferResponse infer_response = 2",
}
FIELD = re.compile(r"(?:(repeated|oneof) )?(?:map<string, (\w+)>|(\w+)) (\w+) = (\d+)")
Field = descriptor_pb2.FieldDescriptorProto


def add_field(message: Any, kind: str, name: str, number: int, label: str | None = None) -> None:
    field = message.field.add(name=name, number=number, label=Field.LABEL_OPTIONAL)
    if label == "repeated":
        field.label = Field.LABEL_REPEATED
    elif label == "oneof":
        if not message.oneof_decl:
            message.oneof_decl.add(name="parameter_choice")
        field.oneof_index = 0
    if kind in MESSAGES or "." in kind:
        field.type, field.type_name = Field.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
    else:
        field.type = getattr(Field, f"TYPE_{kind.upper()}")


def describe() -> dict[str, Any]:
    """A class for every message."""
    file = descriptor_pb2.FileDescriptorProto(name="nestling_open_inference.proto", package=PACKAGE, syntax="proto3")
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for text in filter(None, fields.split("; ")):
            found = FIELD.fullmatch(text)
            assert found is not None, text
            label, values, kind, field, number = found.groups()
            if values:  # a map is a list of pairs
                pair = message.nested_type.add(name=f"{field.title()}Entry")
                pair.options.map_entry = True
                add_field(pair, "string", "key", 1)
                add_field(pair, values, "value", 2)
                label, kind = "repeated", f"{name}.{pair.name}"
            add_field(message, kind, field, int(number), label)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in MESSAGES}


CLASSES = describe()
