"""One request from its start frame to its settlement: prepared, admitted, run, limited, interrupted."""
