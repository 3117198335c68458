//! QUIC's view of the machine: its tasks, its timers and its UDP socket, real
//! or simulated.

use std::future::Future;
use std::io::{self, IoSliceMut};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use host::Datagrams;
use quinn::udp::{RecvMeta, Transmit};
use quinn::{AsyncTimer, AsyncUdpSocket, Runtime, TokioRuntime, UdpPoller};

use crate::transport;

/// Tokio, with tasks that belong to the machine.
#[derive(Debug)]
pub(crate) struct Tasks;

impl Runtime for Tasks {
    fn new_timer(&self, until: Instant) -> Pin<Box<dyn AsyncTimer>> {
        TokioRuntime.new_timer(until)
    }

    #[expect(clippy::disallowed_methods, reason = "a shell: QUIC asks for its tasks here")]
    fn spawn(&self, future: Pin<Box<dyn Future<Output = ()> + Send>>) {
        host::spawn(future);
    }

    fn wrap_udp_socket(&self, socket: std::net::UdpSocket) -> io::Result<Arc<dyn AsyncUdpSocket>> {
        TokioRuntime.wrap_udp_socket(socket)
    }

    #[expect(clippy::disallowed_methods, reason = "a shell: QUIC asks for the time here")]
    fn now(&self) -> Instant {
        host::now()
    }
}

/// Binds `address`.
pub(crate) fn socket(address: SocketAddr) -> io::Result<Arc<dyn AsyncUdpSocket>> {
    match host::datagrams(address) {
        Some(datagrams) => Ok(Arc::new(Simulated(datagrams?))),
        None => TokioRuntime.wrap_udp_socket(transport::socket(address)?),
    }
}

/// A socket of the simulated network, one packet at a time.
struct Simulated(Arc<dyn Datagrams>);

impl std::fmt::Debug for Simulated {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Simulated({})", self.0.local_address())
    }
}

impl AsyncUdpSocket for Simulated {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Box::pin(AlwaysWritable)
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        self.0.send(transmit.destination, transmit.contents);
        Ok(())
    }

    fn poll_recv(
        &self,
        context: &mut Context<'_>,
        buffers: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        let (len, addr) = ready!(self.0.poll_receive(context, &mut buffers[0]));
        meta[0] = RecvMeta { addr, len, stride: len, ecn: None, dst_ip: None };
        Poll::Ready(Ok(1))
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.0.local_address())
    }

    fn may_fragment(&self) -> bool {
        false
    }
}

/// The network takes every packet; it loses those that are too many.
#[derive(Debug)]
struct AlwaysWritable;

impl UdpPoller for AlwaysWritable {
    fn poll_writable(self: Pin<&mut Self>, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
