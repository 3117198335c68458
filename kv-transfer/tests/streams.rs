//! Message and frame streams over loopback: what arrives, and what is left
//! after either side gave up.

#![allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "tests")]

mod mesh;

use std::time::Duration;

use bytes::Bytes;
use kv_transfer::*;
use mesh::{header, pair, within};

#[tokio::test]
async fn messages_travel_both_ways_and_end_in_order() {
    let pair = pair().await;
    let (mut request, mut answer) = pair.to_prefill.open().await.unwrap();
    request.send(&HandoffMessage::Credit { bytes: 1 }).await.unwrap();
    request.send(&HandoffMessage::Credit { bytes: 2 }).await.unwrap();
    request.finish();

    let (mut reply, mut requests) = pair.to_decode.accept().await.unwrap();
    assert_eq!(requests.recv().await.unwrap(), Some(HandoffMessage::Credit { bytes: 1 }));
    assert_eq!(requests.recv().await.unwrap(), Some(HandoffMessage::Credit { bytes: 2 }));
    assert_eq!(requests.recv::<HandoffMessage>().await.unwrap(), None);
    reply.send(&HandoffMessage::Installed).await.unwrap();
    reply.finish();
    assert_eq!(answer.recv().await.unwrap(), Some(HandoffMessage::Installed));
    assert_eq!(answer.recv::<HandoffMessage>().await.unwrap(), None);
}

#[tokio::test]
async fn a_receive_that_is_cancelled_loses_no_bytes() {
    let pair = pair().await;
    let tokens: Vec<u32> = (0..15_000).collect();
    let (mut sender, _answer) = pair.to_prefill.open().await.unwrap();
    let sent = tokens.clone();
    let sending = tokio::spawn(async move {
        for _ in 0..200 {
            sender.send(&RequestEvent::Tokens(sent.clone())).await.unwrap();
        }
        sender.finish();
    });
    let (_reply, mut receiver) = pair.to_decode.accept().await.unwrap();
    let (mut received, mut cancelled) = (0, 0);
    loop {
        tokio::select! {
            biased;
            message = receiver.recv::<RequestEvent>() => match message.unwrap() {
                Some(message) => {
                    assert_eq!(message, RequestEvent::Tokens(tokens.clone()));
                    received += 1;
                }
                None => break,
            },
            () = tokio::task::yield_now() => cancelled += 1,
        }
    }
    sending.await.unwrap();
    assert_eq!(received, 200);
    assert!(cancelled > 0, "nothing was cancelled: the test proves nothing");
}

#[tokio::test]
async fn a_sender_that_is_dropped_resets_the_stream() {
    let pair = pair().await;
    let (mut sender, _answer) = pair.to_prefill.open().await.unwrap();
    sender.send(&HandoffMessage::Installed).await.unwrap();
    let (_reply, mut receiver) = pair.to_decode.accept().await.unwrap();
    assert!(receiver.recv::<HandoffMessage>().await.unwrap().is_some());
    drop(sender);
    let error = within(2, "the reset", receiver.recv::<HandoffMessage>()).await.unwrap_err();
    assert!(matches!(error, TransferError::Reset(1)), "{error}");
}

#[tokio::test]
async fn a_receiver_that_is_dropped_stops_the_sender() {
    let pair = pair().await;
    let (mut sender, _answer) = pair.to_prefill.open().await.unwrap();
    sender.send(&HandoffMessage::Installed).await.unwrap();
    let (_reply, receiver) = pair.to_decode.accept().await.unwrap();
    drop(receiver);
    within(2, "the stop", sender.stopped()).await;
    let error = sender.send(&HandoffMessage::Installed).await.unwrap_err();
    assert!(matches!(error, TransferError::Reset(_)), "{error}");
}

#[tokio::test]
async fn a_message_cut_off_by_its_sender_is_never_taken_for_whole() {
    let pair = pair().await;
    // More than the windows hold, so that the send is still under way.
    let (mut sender, _answer) = pair.to_prefill.open().await.unwrap();
    let prompt = prompt_of(1 << 20);
    let _ = tokio::time::timeout(Duration::from_millis(100), sender.send(&prompt)).await;
    let second = tokio::time::timeout(Duration::from_millis(100), sender.send(&prompt)).await;
    if let Ok(Err(error)) = second {
        assert!(error.to_string().contains("cut off"), "{error}");
    }
    sender.finish();
    let (_reply, mut receiver) = pair.to_decode.accept().await.unwrap();
    while let Ok(message) = receiver.recv::<PrefillRequest>().await {
        assert_eq!(message, Some(prompt.clone()));
    }
}

fn prompt_of(tokens: u32) -> PrefillRequest {
    PrefillRequest {
        protocol: 1,
        handoff: [0; 16],
        request_id: "r".into(),
        fingerprint: [0; 32],
        layout: [0; 32],
        isolation: [0; 32],
        block_tokens: 64,
        tokens: (0..tokens).collect(),
        have_blocks: 0,
        end: tokens,
        codecs: vec![0],
        credit_bytes: 1,
    }
}

#[tokio::test]
async fn a_prompt_of_a_million_tokens_travels() {
    let pair = pair().await;
    let (mut sender, _answer) = pair.to_prefill.open().await.unwrap();
    let prompt = prompt_of(1 << 20);
    let (sent, received) = tokio::join!(sender.send(&prompt), async {
        let (_reply, mut receiver) = pair.to_decode.accept().await.unwrap();
        receiver.recv::<PrefillRequest>().await
    });
    sent.unwrap();
    assert_eq!(received.unwrap(), Some(prompt));
}

#[tokio::test]
async fn another_kind_of_message_is_malformed_and_the_connection_goes_on() {
    let pair = pair().await;
    let (mut sender, _answer) = pair.to_prefill.open().await.unwrap();
    sender.send(&prompt_of(5000)).await.unwrap();
    let (_reply, mut receiver) = pair.to_decode.accept().await.unwrap();
    let error = receiver.recv::<HandoffMessage>().await.unwrap_err();
    assert!(matches!(error, TransferError::Malformed { .. }), "{error}");
    assert!(!pair.to_decode.is_closed());
}

#[tokio::test]
async fn frames_travel_intact_and_can_be_skipped() {
    let pair = pair().await;
    let sizes = [0, 1, 76, 65_536, 3_000_000];
    let connection = pair.to_decode.clone();
    let sending = tokio::spawn(async move {
        let mut writer = connection.open_frames().await.unwrap();
        for (index, size) in (0u32..).zip(sizes) {
            writer.send(&header(index, size), Bytes::from(vec![index as u8 + 1; size])).await.unwrap();
        }
        writer.finish();
    });
    let mut reader = pair.to_prefill.accept_frames().await.unwrap();
    for (index, size) in (0u32..).zip(sizes) {
        assert_eq!(reader.next_header().await.unwrap(), Some(header(index, size)));
        if index == 3 {
            reader.skip_payload().await.unwrap();
            continue;
        }
        let mut place = vec![0; size];
        reader.read_payload(&mut place).await.unwrap();
        assert!(place.iter().all(|&byte| byte == index as u8 + 1));
    }
    assert_eq!(reader.next_header().await.unwrap(), None);
    sending.await.unwrap();
}

#[tokio::test]
async fn a_frame_stream_reset_in_the_middle_is_seen_as_reset() {
    let pair = pair().await;
    let mut writer = pair.to_decode.open_frames().await.unwrap();
    writer.send(&header(0, 1000), Bytes::from(vec![1; 1000])).await.unwrap();
    let mut reader = pair.to_prefill.accept_frames().await.unwrap();
    reader.next_header().await.unwrap().unwrap();
    reader.skip_payload().await.unwrap();
    writer.reset();
    let error = within(2, "the reset", reader.next_header()).await.unwrap_err();
    assert!(matches!(error, TransferError::Reset(1)), "{error}");
}

#[tokio::test]
async fn a_frame_stream_stopped_by_its_reader_fails_the_writer() {
    let pair = pair().await;
    let mut writer = pair.to_decode.open_frames().await.unwrap();
    writer.send(&header(0, 1000), Bytes::from(vec![1; 1000])).await.unwrap();
    pair.to_prefill.accept_frames().await.unwrap().stop();
    let payload = Bytes::from(vec![1; 1 << 20]);
    let error = within(2, "the stop", async {
        loop {
            if let Err(error) = writer.send(&header(0, 1 << 20), payload.clone()).await {
                return error;
            }
        }
    });
    assert!(matches!(error.await, TransferError::Reset(1)));
}

/// Gives up one frame stream in one of five ways. Together they carry more
/// bytes than the connection's window: bytes of dead streams must be given back.
async fn cancelled_transfer(pair: &mesh::Pair, way: usize) {
    let mut writer = pair.to_decode.open_frames().await.unwrap();
    let payload = Bytes::from(vec![7; 100_000]);
    writer.send(&header(0, 100_000), payload.clone()).await.unwrap();
    match way {
        0 => writer.reset(),
        1 => pair.to_prefill.accept_frames().await.unwrap().stop(),
        2 => drop(pair.to_prefill.accept_frames().await.unwrap()),
        3 => {
            let mut reader = pair.to_prefill.accept_frames().await.unwrap();
            reader.next_header().await.unwrap();
            drop(writer);
        }
        _ => {
            let mut reader = pair.to_prefill.accept_frames().await.unwrap();
            reader.next_header().await.unwrap();
            reader.stop();
            let _ = writer.send(&header(1, 100_000), payload).await;
        }
    }
    if way == 0 {
        // Even a stream that came to nothing is opened, and must be taken.
        let _ = pair.to_prefill.accept_frames().await.unwrap().next_header().await;
    }
}

async fn whole_transfer(pair: &mesh::Pair) {
    let sending = async {
        let mut writer = pair.to_decode.open_frames().await.unwrap();
        writer.send(&header(9, 500_000), Bytes::from(vec![3; 500_000])).await.unwrap();
        writer.finish();
    };
    let receiving = async {
        let mut reader = pair.to_prefill.accept_frames().await.unwrap();
        assert_eq!(reader.next_header().await.unwrap(), Some(header(9, 500_000)));
        reader.read_payload(&mut vec![0; 500_000]).await.unwrap();
        assert_eq!(reader.next_header().await.unwrap(), None);
    };
    tokio::join!(sending, receiving);
}

#[tokio::test]
async fn after_300_cancelled_frame_streams_a_transfer_works_at_once() {
    let pair = pair().await;
    for index in 0..300 {
        within(5, "a cancelled transfer", cancelled_transfer(&pair, index % 5)).await;
    }
    within(1, "the transfer after them", whole_transfer(&pair)).await;
}

#[tokio::test]
async fn five_thousand_cancelled_frame_streams_leave_nothing_open() {
    let pair = pair().await;
    for index in 0..5000 {
        within(5, "a cancelled transfer", cancelled_transfer(&pair, index % 5)).await;
    }
    within(1, "the transfer after them", whole_transfer(&pair)).await;
    // All places are free again. (quinn tells of free places by the eighth.)
    let mut open = Vec::new();
    within(5, "opening all streams", async {
        for _ in 0..56 {
            open.push(pair.to_decode.open_frames().await.unwrap());
        }
    })
    .await;
}

#[tokio::test]
async fn three_thousand_abandoned_message_streams_leave_nothing_open() {
    let pair = pair().await;
    for index in 0..3000 {
        within(5, "an abandoned request", async {
            let (mut sender, answer) = pair.to_prefill.open().await.unwrap();
            sender.send(&HandoffMessage::Installed).await.unwrap();
            let (reply, mut receiver) = pair.to_decode.accept().await.unwrap();
            match index % 3 {
                0 => drop((sender, answer)),
                1 => drop((reply, receiver)),
                _ => {
                    receiver.recv::<HandoffMessage>().await.unwrap();
                    drop((sender, reply));
                }
            }
        })
        .await;
    }
    let mut open = Vec::new();
    within(5, "opening all streams", async {
        for _ in 0..896 {
            open.push(pair.to_prefill.open().await.unwrap());
        }
    })
    .await;
}

#[tokio::test]
async fn a_message_overtakes_frames_that_nobody_reads() {
    let pair = pair().await;
    let connection = pair.to_decode.clone();
    let stuck = tokio::spawn(async move {
        let mut writers = Vec::new();
        for _ in 0..8 {
            let mut writer = connection.open_frames().await.unwrap();
            let payload = Bytes::from(vec![1; 4 << 20]);
            let _ =
                tokio::time::timeout(Duration::from_millis(200), writer.send(&header(0, 4 << 20), payload))
                    .await;
            writers.push(writer);
        }
        writers
    });
    let _writers = stuck.await.unwrap();
    let (mut sender, _answer) = pair.to_decode.open().await.unwrap();
    within(1, "the message", async {
        sender.send(&HandoffMessage::Installed).await.unwrap();
        let (_reply, mut receiver) = pair.to_prefill.accept().await.unwrap();
        assert!(receiver.recv::<HandoffMessage>().await.unwrap().is_some());
    })
    .await;
}
