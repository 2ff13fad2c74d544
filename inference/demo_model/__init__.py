"""The bundled demo model's weights and card; `demo/` has its corpus and training."""
