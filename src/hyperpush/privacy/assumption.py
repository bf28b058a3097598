"""What every claim of an ε takes for granted."""

# Every result that reports an ε carries this.
ASSUMPTION = (
    "ε assumes ideal real-valued noise. Noise is drawn as float32 or float64. "
    "An attacker who lists the representable draws can tell two data sets apart from one released number. "
    "Hardened samplers are not there yet."
)
