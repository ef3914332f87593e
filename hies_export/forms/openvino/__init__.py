"""Write an exported encoder in 8 bits for OpenVINO, calibrated on rows.

The input is an ONNX `Export` in float32 and batches of rows; the output is an `Export` with `.xml` and `.bin`.

- `export.py`: `quantize_openvino`, the whole export, by NNCF's post-training quantisation.
"""
