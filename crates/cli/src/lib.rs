//! The homeostat program.
