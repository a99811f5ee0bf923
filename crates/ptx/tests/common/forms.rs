//! Every instruction form of the language, each as a small program.

use flashcore_ptx::*;

/// An instruction form: its name, and a function that writes it.
pub(crate) struct Form {
    pub(crate) name: String,
    write: Box<dyn Fn(&mut Scene) + Send + Sync>,
}

/// A program into which forms are written, with operands of every kind available.
pub(crate) struct Scene {
    pub(crate) k: Builder,
    global: Reg<GlobalAddress>,
}

/// The maps a scene has, of one to five dimensions.
fn tensor_box(rank: usize) -> TensorBox {
    TileLayout { element: Element::F16, rows: 64, columns: 64, swizzle: Swizzle::B128 }
        .tensor_box(rank)
}

impl Scene {
    pub(crate) fn new(target: Target) -> Self {
        let mut k = Builder::new("form", target, 128).blocks_per_multiprocessor(1);
        k.shared("room", 4096, 1024);
        let global = k.parameter::<GlobalAddress>("data");
        Scene { k, global }
    }

    /// Writes a branch with forms inside.
    pub(crate) fn if_else(
        &mut self,
        condition: Value<Pred>,
        then: impl FnOnce(&mut Scene),
        otherwise: impl FnOnce(&mut Scene),
    ) {
        let global = self.global;
        self.k.if_else(
            condition,
            |k| Scene::inside(k, global, then),
            |k| Scene::inside(k, global, otherwise),
        );
    }

    /// Writes a loop with forms inside.
    pub(crate) fn loop_(&mut self, body: impl FnOnce(&mut Scene)) {
        let global = self.global;
        self.k.loop_(|k| Scene::inside(k, global, body));
    }

    /// Lends the builder to a scene for a while.
    fn inside(k: &mut Builder, global: Reg<GlobalAddress>, body: impl FnOnce(&mut Scene)) {
        let empty = Builder::new("lent", k.target(), 32);
        let mut scene = Scene { k: std::mem::replace(k, empty), global };
        body(&mut scene);
        *k = scene.k;
    }

    /// Returns a register of a type, with a value that is unknown at compile time.
    fn register(&mut self, ty: Type) -> Register {
        let k = &mut self.k;
        match ty {
            Type::Pred => {
                let word = k.load::<U32, _>(self.global);
                k.eval(word.differs(0)).register()
            }
            Type::F16 => k.load::<F16, _>(self.global).register(),
            Type::BF16 => k.load::<BF16, _>(self.global).register(),
            Type::E4M3x2 => k.load::<E4M3x2, _>(self.global).register(),
            Type::E5M2x2 => k.load::<E5M2x2, _>(self.global).register(),
            Type::U32 => k.load::<U32, _>(self.global).register(),
            Type::S32 => k.load::<S32, _>(self.global).register(),
            Type::F32 => k.load::<F32, _>(self.global).register(),
            Type::F16x2 => k.load::<F16x2, _>(self.global).register(),
            Type::BF16x2 => k.load::<BF16x2, _>(self.global).register(),
            Type::U64 => k.load::<U64, _>(self.global).register(),
            Type::S64 => k.load::<S64, _>(self.global).register(),
        }
    }

    fn registers(&mut self, ty: Type, count: usize) -> Vec<Register> {
        (0..count).map(|_| self.register(ty)).collect()
    }

    /// Returns an unwritten register of a type, for the form to write.
    fn fresh(&mut self, ty: Type) -> Register {
        let k = &mut self.k;
        match ty {
            Type::Pred => k.register::<Pred>().register(),
            Type::F16 => k.register::<F16>().register(),
            Type::BF16 => k.register::<BF16>().register(),
            Type::E4M3x2 => k.register::<E4M3x2>().register(),
            Type::E5M2x2 => k.register::<E5M2x2>().register(),
            Type::U32 => k.register::<U32>().register(),
            Type::S32 => k.register::<S32>().register(),
            Type::F32 => k.register::<F32>().register(),
            Type::F16x2 => k.register::<F16x2>().register(),
            Type::BF16x2 => k.register::<BF16x2>().register(),
            Type::U64 => k.register::<U64>().register(),
            Type::S64 => k.register::<S64>().register(),
        }
    }

    fn address(&mut self, space: Space) -> Address {
        let base = match space {
            Space::Global => self.global.register(),
            Space::Shared => self.k.shared_address(0).register(),
            Space::Cluster => {
                let local = self.k.shared_address(0);
                self.k.map_shared(local, 0).register()
            }
        };
        Address { base, offset: 16 }
    }

    /// Returns an operand of this type as a register and, if the type has them, as an immediate.
    fn operands(&mut self, ty: Type) -> Vec<Operand> {
        let mut all = vec![Operand::Register(self.register(ty))];
        if ty.has_immediates() {
            all.push(if ty == Type::F32 { Operand::f32(-1.5) } else { Operand::u32(7) });
        }
        all
    }

    /// An atomic operation, with both ways to give its operand.
    fn atomic(
        &mut self,
        operation: AtomicOperation,
        ty: Type,
        space: Space,
        scope: Scope,
        order: AtomicOrder,
    ) {
        let (address, dst) = (self.address(space), self.fresh(ty));
        for value in self.operands(ty) {
            let atomic =
                Instruction::Atomic { operation, ty, dst, space, address, value, scope, order };
            self.k.push(atomic);
        }
    }

    /// A reduction of so many registers.
    fn reduce(
        &mut self,
        operation: AtomicOperation,
        ty: Type,
        count: usize,
        space: Space,
        scope: Scope,
        order: AtomicOrder,
    ) {
        let (address, src) = (self.address(space), self.registers(ty, count));
        let reduce = Instruction::Reduce { operation, ty, src, space, address, scope, order };
        self.k.push(reduce);
    }
}

impl Form {
    fn new(name: impl Into<String>, write: impl Fn(&mut Scene) + Send + Sync + 'static) -> Self {
        Form { name: name.into(), write: Box::new(write) }
    }

    /// Writes the form.
    pub(crate) fn write(&self, scene: &mut Scene) {
        (self.write)(scene);
    }

    /// Returns the form as a program for a target, or why it is invalid.
    pub(crate) fn program(&self, target: Target) -> Result<Program, ValidationError> {
        let mut scene = Scene::new(target);
        self.write(&mut scene);
        scene.k.finish()
    }
}

/// Writes forms one after another into one program, skipping those the target
/// cannot have.
pub(crate) fn all_in_one(forms: &[Form], target: Target) -> Result<Program, ValidationError> {
    let mut scene = Scene::new(target);
    for form in forms {
        if form.program(target).is_ok() {
            form.write(&mut scene);
        }
    }
    scene.k.finish()
}

/// Returns every form.
pub(crate) fn all() -> Vec<Form> {
    let mut forms = Vec::new();
    arithmetic(&mut forms);
    memory(&mut forms);
    warp(&mut forms);
    matrix(&mut forms);
    barriers(&mut forms);
    copies(&mut forms);
    control(&mut forms);
    forms
}

fn arithmetic(forms: &mut Vec<Form>) {
    use BinaryOperation as B;
    use UnaryOperation as U;
    for ty in Type::ALL {
        forms.push(Form::new(format!("move {ty:?}"), move |s| {
            let src = s.register(ty).into();
            let dst = s.fresh(ty);
            s.k.push(Instruction::Move { dst, src });
        }));
        if ty.has_immediates() || ty.bits() == 32 {
            forms.push(Form::new(format!("move constant {ty:?}"), move |s| {
                let dst = s.fresh(ty);
                s.k.push(Instruction::Move { dst, src: Operand::u32(0x3C00) });
            }));
        }
        for operation in [
            U::Negate,
            U::Absolute,
            U::Not,
            U::Exp2,
            U::Log2,
            U::Reciprocal,
            U::ReciprocalSqrt,
            U::Sqrt,
            U::Tanh,
            U::PopulationCount,
            U::LeadingZeros,
        ] {
            forms.push(Form::new(format!("{operation:?} {ty:?}"), move |s| {
                let dst = s.fresh(ty);
                let a = s.register(ty).into();
                s.k.push(Instruction::Unary { operation, ty, dst, a });
            }));
        }
        for operation in [
            B::Add,
            B::Subtract,
            B::Multiply,
            B::MultiplyHigh,
            B::Divide,
            B::DivideRounded,
            B::Remainder,
            B::Minimum,
            B::Maximum,
            B::And,
            B::Or,
            B::Xor,
            B::ShiftLeft,
            B::ShiftRight,
        ] {
            forms.push(Form::new(format!("{operation:?} {ty:?}"), move |s| {
                let shift = matches!(operation, B::ShiftLeft | B::ShiftRight);
                let a = s.register(ty).into();
                for b in s.operands(if shift { Type::U32 } else { ty }) {
                    let dst = s.fresh(ty);
                    s.k.push(Instruction::Binary { operation, ty, dst, a, b });
                }
            }));
        }
        forms.push(Form::new(format!("multiply-add {ty:?}"), move |s| {
            let dst = s.fresh(ty);
            let [a, b, c] = [(); 3].map(|_| s.register(ty).into());
            s.k.push(Instruction::MultiplyAdd { ty, dst, a, b, c });
        }));
        forms.push(Form::new(format!("multiply wide {ty:?}"), move |s| {
            let dst = s.fresh(if ty == Type::S32 { Type::S64 } else { Type::U64 });
            let [a, b] = [(); 2].map(|_| s.register(ty).into());
            s.k.push(Instruction::MultiplyWide { ty, dst, a, b });
        }));
        for comparison in Comparison::ALL {
            forms.push(Form::new(format!("{comparison:?} {ty:?}"), move |s| {
                let a = s.register(ty).into();
                for b in s.operands(ty) {
                    let dst = s.fresh(Type::Pred);
                    s.k.push(Instruction::Compare { comparison, ty, dst, a, b });
                }
            }));
        }
        forms.push(Form::new(format!("select {ty:?}"), move |s| {
            let condition = s.register(Type::Pred);
            let a = s.register(ty).into();
            for b in s.operands(ty) {
                let dst = s.fresh(ty);
                s.k.push(Instruction::Select { ty, dst, condition, a, b });
            }
        }));
        for from in Type::ALL {
            forms.push(Form::new(format!("convert {from:?} to {ty:?}"), move |s| {
                let (dst, src) = (s.fresh(ty), s.register(from));
                s.k.push(Instruction::Convert { dst, src });
            }));
            forms.push(Form::new(format!("convert packed {from:?} to {ty:?}"), move |s| {
                let (dst, src) = (s.fresh(ty), s.register(from));
                s.k.push(Instruction::ConvertPacked { dst, src });
            }));
            if from.bits() == ty.bits() && from != ty {
                forms.push(Form::new(format!("{from:?} reinterpreted as {ty:?}"), move |s| {
                    let (dst, src) = (s.fresh(ty), s.register(from).into());
                    s.k.push(Instruction::Move { dst, src });
                }));
            }
            if from.bits() * 2 == ty.bits() {
                forms.push(Form::new(format!("split {ty:?} into {from:?}"), move |s| {
                    let (low, high, src) = (s.fresh(from), s.fresh(from), s.register(ty));
                    s.k.push(Instruction::Split { low, high, src });
                }));
                forms.push(Form::new(format!("join {ty:?} of {from:?}"), move |s| {
                    let (low, high) = (s.register(from).into(), s.register(from).into());
                    let dst = s.fresh(ty);
                    s.k.push(Instruction::Join { dst, low, high });
                }));
            }
        }
        forms.push(Form::new(format!("convert pair to {ty:?}"), move |s| {
            for low in s.operands(Type::F32) {
                let (dst, high) = (s.fresh(ty), s.register(Type::F32).into());
                s.k.push(Instruction::ConvertPair { dst, high, low });
            }
        }));
        forms.push(Form::new(format!("parameter {ty:?}"), move |s| match ty {
            Type::U32 => _ = s.k.parameter::<U32>("p"),
            Type::S32 => _ = s.k.parameter::<S32>("p"),
            Type::U64 => _ = s.k.parameter::<U64>("p"),
            Type::S64 => _ = s.k.parameter::<S64>("p"),
            Type::F32 => _ = s.k.parameter::<F32>("p"),
            _ => {}
        }));
    }
    forms.push(Form::new("join U64 of constants", |s| {
        let dst = s.fresh(Type::U64);
        let (low, high) = (Operand::u32(1), Operand::u32(2));
        s.k.push(Instruction::Join { dst, low, high });
    }));
    forms.push(Form::new("bytes and bits", |s| {
        let dst = s.fresh(Type::U32);
        let [a, b, c] = [(); 3].map(|_| s.register(Type::U32).into());
        let selector = Operand::u32(0x5410);
        s.k.push(Instruction::PermuteBytes { dst, a, b, selector });
        s.k.push(Instruction::PermuteBytes { dst, a, b, selector: c });
        s.k.push(Instruction::FunnelShift { left: true, dst, low: a, high: b, amount: c });
        let amount = Operand::u32(5);
        s.k.push(Instruction::FunnelShift { left: false, dst, low: a, high: b, amount });
        s.k.push(Instruction::Logic3 { dst, a, b, c, table: 0x96 });
    }));
    for special in SpecialRegister::all() {
        forms.push(Form::new(format!("{special:?}"), move |s| {
            let dst = s.fresh(if special.is_wide() { Type::U64 } else { Type::U32 });
            s.k.push(Instruction::ReadSpecial { dst, special });
        }));
    }
}

fn memory(forms: &mut Vec<Form>) {
    let spaces = [Space::Global, Space::Shared, Space::Cluster];
    let mut load_orders = vec![LoadOrder::Weak];
    let mut store_orders = vec![StoreOrder::Weak];
    for scope in Scope::ALL {
        load_orders.extend([LoadOrder::Relaxed(scope), LoadOrder::Acquire(scope)]);
        store_orders.extend([StoreOrder::Relaxed(scope), StoreOrder::Release(scope)]);
    }
    for space in spaces {
        for ty in Type::ALL {
            for count in [1, 2, 4] {
                forms.push(Form::new(
                    format!("load and store {count} {ty:?} {space:?}"),
                    move |s| {
                        let address = s.address(space);
                        let dst: Vec<_> = (0..count).map(|_| s.fresh(ty)).collect();
                        let src = dst.clone();
                        let (order, cache) = (LoadOrder::Weak, LoadCache::Default);
                        s.k.push(Instruction::Load { dst, space, address, order, cache });
                        let (order, cache) = (StoreOrder::Weak, StoreCache::Default);
                        s.k.push(Instruction::Store { src, space, address, order, cache });
                    },
                ));
            }
        }
        for order in load_orders.clone() {
            forms.push(Form::new(format!("load {order:?} {space:?}"), move |s| {
                let (address, dst) = (s.address(space), vec![s.fresh(Type::U32)]);
                let cache = LoadCache::Default;
                s.k.push(Instruction::Load { dst, space, address, order, cache });
            }));
        }
        for order in store_orders.clone() {
            forms.push(Form::new(format!("store {order:?} {space:?}"), move |s| {
                let (address, src) = (s.address(space), vec![s.register(Type::U32)]);
                let cache = StoreCache::Default;
                s.k.push(Instruction::Store { src, space, address, order, cache });
            }));
        }
    }
    for count in [1, 4] {
        for cache in LoadCache::ALL {
            let name = format!("load {count} {cache:?}");
            forms.push(Form::new(name, move |s| {
                let space = Space::Global;
                let address = s.address(space);
                let dst = (0..count).map(|_| s.fresh(Type::U32)).collect();
                let order = LoadOrder::Weak;
                s.k.push(Instruction::Load { dst, space, address, order, cache });
            }));
        }
        for cache in StoreCache::ALL {
            let name = format!("store {count} {cache:?}");
            forms.push(Form::new(name, move |s| {
                let space = Space::Global;
                let address = s.address(space);
                let src = s.registers(Type::F32, count);
                let order = StoreOrder::Weak;
                s.k.push(Instruction::Store { src, space, address, order, cache });
            }));
        }
    }
    forms.push(Form::new("prefetch", |s| {
        let address = s.address(Space::Global);
        let dst = s.fresh(Type::U32);
        s.k.push(Instruction::LoadByte { dst, address });
        s.k.push(Instruction::PrefetchL2 { address });
    }));
    let orders = AtomicOrder::ALL;
    for space in spaces {
        for ty in Type::ALL {
            for operation in AtomicOperation::ALL {
                let (scope, order) = (Scope::Gpu, AtomicOrder::Relaxed);
                forms.push(Form::new(format!("atomic {operation:?} {ty:?} {space:?}"), move |s| {
                    s.atomic(operation, ty, space, scope, order);
                }));
                forms.push(Form::new(format!("reduce {operation:?} {ty:?} {space:?}"), move |s| {
                    s.reduce(operation, ty, 1, space, scope, order);
                }));
            }
            forms.push(Form::new(format!("compare and swap {ty:?} {space:?}"), move |s| {
                let (address, dst) = (s.address(space), s.fresh(ty));
                let [expected, value] = [(); 2].map(|_| s.register(ty).into());
                s.k.push(Instruction::CompareAndSwap {
                    scope: Scope::Gpu,
                    order: AtomicOrder::AcquireRelease,
                    space,
                    ty,
                    dst,
                    address,
                    expected,
                    value,
                });
            }));
        }
        for order in orders {
            for scope in Scope::ALL {
                let name = format!("atomic and reduction {order:?} {scope:?} {space:?}");
                let (operation, ty) = (AtomicOperation::Add, Type::U32);
                forms.push(Form::new(name.clone() + " (atomic)", move |s| {
                    s.atomic(operation, ty, space, scope, order);
                }));
                forms.push(Form::new(name + " (reduction)", move |s| {
                    s.reduce(operation, ty, 1, space, scope, order);
                }));
            }
        }
        for count in [2, 4] {
            forms.push(Form::new(format!("reduce {count} f32 {space:?}"), move |s| {
                let (operation, order) = (AtomicOperation::Add, AtomicOrder::Relaxed);
                s.reduce(operation, Type::F32, count, space, Scope::Gpu, order);
            }));
        }
    }
    for count in [1, 2, 4] {
        for transpose in [false, true] {
            forms.push(Form::new(format!("load {count} matrices {transpose}"), move |s| {
                let address = s.address(Space::Shared);
                let dst = (0..count).map(|_| s.fresh(Type::F16x2)).collect();
                s.k.push(Instruction::LoadMatrix { dst, address, transpose });
            }));
            forms.push(Form::new(format!("store {count} matrices {transpose}"), move |s| {
                let (address, src) = (s.address(Space::Shared), s.registers(Type::BF16x2, count));
                s.k.push(Instruction::StoreMatrix { src, address, transpose });
            }));
        }
    }
}

fn warp(forms: &mut Vec<Form>) {
    for mode in ShuffleMode::ALL {
        for with_valid in [false, true] {
            forms.push(Form::new(format!("shuffle {mode:?} {with_valid}"), move |s| {
                let valid = with_valid.then(|| s.fresh(Type::Pred));
                let (dst, src) = (s.fresh(Type::F32), s.register(Type::F32));
                for lane in s.operands(Type::U32) {
                    let clamp = 31;
                    s.k.push(Instruction::Shuffle { mode, dst, valid, src, lane, clamp });
                }
            }));
        }
    }
    forms.push(Form::new("votes", |s| {
        let predicate = s.register(Type::Pred);
        for mode in [VoteMode::All, VoteMode::Any] {
            let dst = s.fresh(Type::Pred);
            s.k.push(Instruction::Vote { mode, dst, predicate });
        }
        let dst = s.fresh(Type::U32);
        s.k.push(Instruction::Ballot { dst, predicate });
        s.k.push(Instruction::WarpSync);
    }));
    forms.push(Form::new("elect", |s| _ = s.k.elect()));
}

fn packed(element: Element) -> Type {
    match element {
        Element::F32 => Type::F32,
        Element::F16 => Type::F16x2,
        Element::BF16 => Type::BF16x2,
        Element::E4M3 | Element::E5M2 | Element::Int8 => Type::U32,
    }
}

const ELEMENTS: [Element; 5] =
    [Element::F32, Element::F16, Element::BF16, Element::E4M3, Element::E5M2];

fn matrix(forms: &mut Vec<Form>) {
    for shape in MmaShape::ALL {
        for element in ELEMENTS {
            for accumulator in ELEMENTS {
                let name = format!("mma {shape:?} {element} into {accumulator}");
                forms.push(Form::new(name, move |s| {
                    let (a, b) = if shape == MmaShape::M16N8K8 { (2, 1) } else { (4, 2) };
                    let a = s.registers(packed(element), a);
                    let b = s.registers(packed(element), b);
                    let count = if accumulator == Element::F32 { 4 } else { 2 };
                    let c = s.registers(packed(accumulator), count);
                    let d = (0..count).map(|_| s.fresh(packed(accumulator))).collect();
                    s.k.push(Instruction::Mma { shape, element, accumulator, d, a, b, c });
                }));
            }
        }
    }
    for n in (8..=256).step_by(8) {
        forms.push(wgmma(
            n,
            [Element::F16; 2],
            Element::F32,
            true,
            [false; 2],
            Some(Accumulate::No),
        ));
    }
    let accumulate = Some(Accumulate::Yes);
    for a_element in ELEMENTS {
        for b_element in ELEMENTS {
            for accumulator in ELEMENTS {
                for a_shared in [true, false] {
                    let elements = [a_element, b_element];
                    forms.push(wgmma(64, elements, accumulator, a_shared, [false; 2], accumulate));
                }
            }
        }
    }
    for element in [Element::F16, Element::BF16, Element::E4M3] {
        for transposes in [[false, true], [true, false], [true, true]] {
            for a_shared in [true, false] {
                let elements = [element; 2];
                forms.push(wgmma(32, elements, Element::F32, a_shared, transposes, accumulate));
            }
        }
    }
    let form = wgmma(16, [Element::BF16; 2], Element::F32, true, [false, true], None);
    forms.push(Form { name: "wgmma by a predicate".to_owned(), ..form });
}

/// Without `accumulate`, a predicate decides.
fn wgmma(
    n: u32,
    elements: [Element; 2],
    accumulator: Element,
    a_shared: bool,
    transposes: [bool; 2],
    accumulate: Option<Accumulate>,
) -> Form {
    let place = if a_shared { "shared" } else { "registers" };
    let name = format!(
        "wgmma n{n} {} {} into {accumulator}, a in {place}, transposed {transposes:?}, {accumulate:?}",
        elements[0], elements[1]
    );
    Form::new(name, move |s| {
        let accumulate = accumulate.unwrap_or_else(|| Accumulate::If(s.register(Type::Pred)));
        let descriptor = s.register(Type::U64);
        let a = if a_shared {
            WgmmaA::Shared { descriptor, transpose: transposes[0] }
        } else {
            let registers = s.registers(packed(elements[0]), 4);
            WgmmaA::Registers(registers.try_into().unwrap())
        };
        let count = if accumulator == Element::F32 { n / 2 } else { n / 4 } as usize;
        let d = s.registers(packed(accumulator), count);
        for negate in [false, true] {
            s.k.push(Instruction::WgmmaFence);
            s.k.push(Instruction::Wgmma {
                n,
                a_element: elements[0],
                b_element: elements[1],
                accumulator,
                d: d.clone(),
                accumulate,
                a,
                b: descriptor,
                b_transpose: transposes[1],
                negate_a: negate,
                negate_b: negate,
            });
            s.k.push(Instruction::WgmmaCommit);
            s.k.push(Instruction::WgmmaWait { pending: 0 });
        }
    })
}

fn barriers(forms: &mut Vec<Form>) {
    forms.push(Form::new("named barriers", |s| {
        for barrier in s.operands(Type::U32) {
            s.k.push(Instruction::BarrierSync { barrier, threads: None });
            let threads = Operand::u32(128);
            s.k.push(Instruction::BarrierSync { barrier, threads: Some(threads) });
            s.k.push(Instruction::BarrierArrive { barrier, threads });
            let threads = s.register(Type::U32).into();
            s.k.push(Instruction::BarrierSync { barrier, threads: Some(threads) });
            s.k.push(Instruction::BarrierArrive { barrier, threads });
        }
    }));
    forms.push(Form::new("cluster barrier", |s| {
        for order in [ClusterOrder::Release, ClusterOrder::Relaxed] {
            s.k.push(Instruction::ClusterArrive { order });
            s.k.push(Instruction::ClusterWait);
        }
    }));
    forms.push(Form::new("mbarrier life", |s| {
        let address = s.address(Space::Shared);
        for count in s.operands(Type::U32) {
            s.k.push(Instruction::MbarrierInit { address, count });
        }
        s.k.push(Instruction::MbarrierInvalidate { address });
    }));
    for space in [Space::Shared, Space::Cluster] {
        forms.push(Form::new(format!("mbarrier arrive {space:?}"), move |s| {
            let address = s.address(space);
            s.k.push(Instruction::MbarrierArrive { space, address, count: None });
            for count in s.operands(Type::U32) {
                s.k.push(Instruction::MbarrierArrive { space, address, count: Some(count) });
                let bytes = count;
                s.k.push(Instruction::MbarrierArriveExpect { space, address, bytes });
            }
        }));
    }
    forms.push(Form::new("mbarrier expect", |s| {
        let address = s.address(Space::Shared);
        for bytes in s.operands(Type::U32) {
            s.k.push(Instruction::MbarrierExpect { address, bytes });
        }
    }));
    for scope in [Scope::Block, Scope::Cluster] {
        forms.push(Form::new(format!("mbarrier wait {scope:?}"), move |s| {
            let address = s.address(Space::Shared);
            for parity in [s.register(Type::U32).into(), Operand::u32(1)] {
                let dst = s.fresh(Type::Pred);
                s.k.push(Instruction::MbarrierTryWait { dst, address, parity, scope });
                s.k.push(Instruction::MbarrierWait { address, parity, scope });
            }
        }));
    }
    forms.push(Form::new("mbarrier arrive on copies", |s| {
        let address = s.address(Space::Shared);
        s.k.push(Instruction::MbarrierArriveOnCopies { address });
    }));
    for scope in Scope::ALL {
        forms.push(Form::new(format!("fence {scope:?}"), move |s| {
            s.k.fence(Fence::AcquireRelease(scope));
            s.k.fence(Fence::SequentiallyConsistent(scope));
        }));
    }
    for fence in
        [Fence::MbarrierInit, Fence::ProxyAsyncShared, Fence::ProxyAsyncGlobal, Fence::ProxyAsync]
    {
        forms.push(Form::new(format!("fence {fence:?}"), move |s| s.k.fence(fence)));
    }
}

fn copies(forms: &mut Vec<Form>) {
    for (bytes, cache) in [
        (4, CopyCache::All),
        (8, CopyCache::All),
        (16, CopyCache::All),
        (16, CopyCache::L2Only),
        (8, CopyCache::L2Only),
    ] {
        forms.push(Form::new(format!("copy {bytes} {cache:?}"), move |s| {
            let (dst, src) = (s.address(Space::Shared), s.address(Space::Global));
            let source_bytes = Some(s.register(Type::U32).into());
            let plain = Instruction::CopyAsync { dst, src, bytes, source_bytes: None, cache };
            s.k.push(plain);
            s.k.push(Instruction::CopyAsync { dst, src, bytes, source_bytes, cache });
            s.k.push(Instruction::CopyAsyncCommit);
            s.k.push(Instruction::CopyAsyncWait { pending: 1 });
        }));
    }
    for with_multicast in [false, true] {
        let name = format!("multicast {with_multicast}");
        forms.push(Form::new(format!("bulk load {name}"), move |s| {
            let [dst, src, barrier] = [Space::Shared, Space::Global, Space::Shared]
                .map(|space| Address { offset: 0, ..s.address(space) });
            let multicast = with_multicast.then(|| s.register(Type::U32));
            for bytes in [Operand::u32(64), s.register(Type::U32).into()] {
                s.k.push(Instruction::BulkLoad { dst, src, bytes, barrier, multicast });
            }
        }));
        for rank in 1..=5 {
            forms.push(Form::new(format!("tensor load {rank}d {name}"), move |s| {
                let map = s.k.tensor_map("map", tensor_box(rank)).address.register();
                let [dst, barrier] = [(); 2].map(|_| s.address(Space::Shared));
                let multicast = with_multicast.then(|| s.register(Type::U32));
                let mut coordinates = vec![Operand::u32(3); rank];
                coordinates[0] = s.register(Type::S32).into();
                s.k.push(Instruction::TensorLoad { dst, map, coordinates, barrier, multicast });
            }));
        }
    }
    forms.push(Form::new("bulk store", move |s| {
        let (dst, src) = (s.address(Space::Global), s.address(Space::Shared));
        for bytes in [Operand::u32(64), s.register(Type::U32).into()] {
            s.k.push(Instruction::BulkStore { dst, src, bytes });
        }
    }));
    let mut elements: Vec<_> = ELEMENTS.into_iter().map(BulkElement::Float).collect();
    elements.push(BulkElement::U32);
    for ty in elements {
        forms.push(Form::new(format!("bulk add {ty:?}"), move |s| {
            let (dst, src) = (s.address(Space::Global), s.address(Space::Shared));
            let bytes = Operand::u32(64);
            s.k.push(Instruction::BulkReduceAdd { ty, dst, src, bytes });
        }));
    }
    for rank in 1..=5 {
        forms.push(Form::new(format!("tensor store {rank}d"), move |s| {
            let map = s.k.tensor_map("map", tensor_box(rank)).address.register();
            let src = s.address(Space::Shared);
            let coordinates = vec![s.register(Type::S32).into(); rank];
            s.k.push(Instruction::TensorStore { map, coordinates: coordinates.clone(), src });
            s.k.push(Instruction::TensorReduceAdd { map, coordinates, src });
            s.k.push(Instruction::TensorMapPrefetch { map });
        }));
    }
    for read_only in [false, true] {
        forms.push(Form::new(format!("bulk wait {read_only}"), move |s| {
            s.k.push(Instruction::BulkCommit);
            s.k.push(Instruction::BulkWait { pending: 1, read_only });
        }));
    }
}

fn control(forms: &mut Vec<Form>) {
    forms.push(Form::new("if, loop, break", |s| {
        let [first, second] = [(); 2].map(|_| s.k.load::<U32, _>(s.global));
        let global = s.global;
        s.k.for_range(first, second, 2, |k, i| {
            k.if_else(
                i.equals(5),
                |k| {
                    k.store(global, i);
                    k.store(global + 4, i + 1);
                },
                |k| k.store(global, 0.5f32),
            );
            k.if_(i.greater(9), |k| k.store(global, i));
            k.loop_(|k| k.break_if(i.less(3)));
        });
    }));
    forms.push(Form::new("map shared", |s| {
        let (dst, address) = (s.fresh(Type::U32), s.k.shared_address(0).register());
        for rank in s.operands(Type::U32) {
            s.k.push(Instruction::MapShared { dst, address, rank });
        }
    }));
    for (change, count) in [(RegisterChange::Decrease, 24), (RegisterChange::Increase, 256)] {
        forms.push(Form::new(format!("registers {change:?} {count}"), move |s| {
            s.k.push(Instruction::SetMaxRegisters { change, count });
        }));
    }
    forms.push(Form::new("dependent grids", |s| {
        s.k.push(Instruction::GridDependencyWait);
        s.k.push(Instruction::GridDependencyLaunch);
    }));
    forms.push(Form::new("sleep and trap", |s| {
        for nanoseconds in s.operands(Type::U32) {
            s.k.push(Instruction::Sleep { nanoseconds });
        }
        let condition = s.k.load::<U32, _>(s.global);
        s.k.if_(condition.equals(1), |k| k.push(Instruction::Trap));
    }));
}
