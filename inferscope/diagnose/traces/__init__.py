"""Reading of Kineto and Chrome traces: values, the reader of events, and what is computed from them; `diagnose.trace` is the door."""
