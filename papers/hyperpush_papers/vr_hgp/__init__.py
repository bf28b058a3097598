"""VR-HGP beside its theory."""
