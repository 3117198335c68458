//! The router over real sockets: HTTP on one side, scripted nodes on the other.

mod client;
mod faults;
mod input;
mod mesh;
mod shapes;
mod slow_clients;

use client::{get, post};
use mesh::{Act, Mesh, failed, finished, say, started};
