"""Measured errors of VR-HGP, compared with its theory."""
